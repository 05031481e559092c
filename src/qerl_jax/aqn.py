"""Adaptive quantization noise: schedules of sigma, and the transform on norm scales.

QeRL explores by adding Gaussian noise to the scales of RMSNorm, which acts on the quantized
matrices behind them: (w + Z) * x / rms(x), Z ~ N(0, sigma^2), one Z per channel.

Reference: Huang et al. 2025 (arXiv:2510.11696), equations 8 and 10, Algorithm 1.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from qerl_jax.protocols import Params, Schedule
from qerl_jax.tree import flatten_weights, unflatten_weights

# Schedules. A maker takes sigma_start, sigma_end (both >= 0), num_stages K (>= 1) and total_steps M
# (>= 1), and returns sigma as a function of the step, counted from 0; a step past the end has the
# sigma of the last one. Stage i of 0..K-1 holds the steps with floor(step * K / M) = i.
# Where the first and the last noisy value coincide, so that a formula reads 0/0, sigma_end wins.


def released_schedule(
    *, sigma_start: float, sigma_end: float, num_stages: int, total_steps: int
) -> Schedule:
    """Decay as the released code does: a clean stage, then K - 1 geometric values.

    sigma = 0 in stage 0, else s0 * (s1 / s0)^((i - 1) / (K - 2)), so that the last stage has
    sigma_end. num_stages 2 is a clean stage and sigma_end; num_stages 1 is always clean.

    Differs from QeRL: its counter is already 1 at the first rollout, so that its stage 0 is one
    step shorter, and num_stages 2 divides by zero there.
    """
    _check(sigma_start, sigma_end, num_stages, total_steps)

    def schedule(step: int) -> float:
        stage = _stage(step, num_stages, total_steps)
        if stage == 0:
            return 0.0
        return _geometric(sigma_start, sigma_end, _fraction(stage - 1, num_stages - 2))

    return schedule


def paper_eq8_schedule(
    *, sigma_start: float, sigma_end: float, num_stages: int, total_steps: int
) -> Schedule:
    """Decay as equation 8: s0 * (s1 / s0)^(i / (K - 1)), noisy from the first step on.

    num_stages 1 has sigma_end throughout.
    """
    _check(sigma_start, sigma_end, num_stages, total_steps)

    def schedule(step: int) -> float:
        stage = _stage(step, num_stages, total_steps)
        return _geometric(sigma_start, sigma_end, _fraction(stage, num_stages - 1))

    return schedule


def algorithm1_schedule(
    *, sigma_start: float, sigma_end: float, num_stages: int, total_steps: int
) -> Schedule:
    """Decay as the paper's listing: k = floor(step / floor(M / K)); never reaches sigma_end.

    sigma = 0 if k = 0, else s0 * (s1 / s0)^((k - 1) / (K - 1)).

    Differs from the paper: k stops at K - 1, where the listing can run past it when K does not
    divide M, and floor(M / K) is at least 1.
    """
    _check(sigma_start, sigma_end, num_stages, total_steps)
    stage_steps = max(total_steps // num_stages, 1)

    def schedule(step: int) -> float:
        stage = min(step // stage_steps, num_stages - 1)
        if stage == 0:
            return 0.0
        return _geometric(sigma_start, sigma_end, _fraction(stage - 1, num_stages - 1))

    return schedule


def linear_schedule(
    *, sigma_start: float, sigma_end: float, num_stages: int, total_steps: int
) -> Schedule:
    """Decay at a constant rate, every step, after a clean stage 0: weight u of sigma_end.

    u runs from 0 at the first step after stage 0 to 1 at the last step. The paper names the
    linear, cosine and logarithmic decays without formulas; these forms are ours, and they share
    the clean stage of `released_schedule` so that only the decay differs.
    """
    return _decay(lambda u: u, sigma_start, sigma_end, num_stages, total_steps)


def cosine_schedule(
    *, sigma_start: float, sigma_end: float, num_stages: int, total_steps: int
) -> Schedule:
    """Decay slowly at both ends after a clean stage 0: weight (1 - cos(pi u)) / 2 of sigma_end."""
    return _decay(
        lambda u: 0.5 * (1.0 - math.cos(math.pi * u)),
        sigma_start,
        sigma_end,
        num_stages,
        total_steps,
    )


def logarithmic_schedule(
    *, sigma_start: float, sigma_end: float, num_stages: int, total_steps: int
) -> Schedule:
    """Decay fast at first, after a clean stage 0: weight log10(1 + 9 u) of sigma_end."""
    return _decay(
        lambda u: math.log10(1.0 + 9.0 * u), sigma_start, sigma_end, num_stages, total_steps
    )


def constant_schedule(
    *, sigma_start: float, sigma_end: float, num_stages: int, total_steps: int
) -> Schedule:
    """Return sigma_start at every step, from the first on; the other arguments do not matter."""
    _check(sigma_start, sigma_end, num_stages, total_steps)

    def schedule(step: int) -> float:
        return float(sigma_start)

    return schedule


AQN_SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "algorithm1": algorithm1_schedule,
    "constant": constant_schedule,
    "cosine": cosine_schedule,
    "linear": linear_schedule,
    "logarithmic": logarithmic_schedule,
    "paper_eq8": paper_eq8_schedule,
    "released": released_schedule,
}


def matched_norms(params: Params, targets: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the norm scales that the targets select; abstract params will do.

    Args:
        targets: last parts of names: "input_layernorm", "post_attention_layernorm", "q_norm",
            "k_norm", or "norm", the final norm.

    Raises:
        ValueError: no target, or a target that matches no norm.
    """
    norms = [name for name in flatten_weights(params) if name.endswith("norm")]
    available = sorted({name.rsplit("/", 1)[-1] for name in norms})
    if not targets:
        raise ValueError(f"aqn.targets: names no norm; this model has {', '.join(available)}")
    for target in targets:
        if target not in available:
            raise ValueError(
                f'aqn.targets: "{target}" matches no norm; this model has '
                f"{', '.join(available) or 'none'}"
            )
    return tuple(name for name in norms if name.rsplit("/", 1)[-1] in targets)


def perturb_norm_scales(
    params: Params,
    key: Key[Array, ""],
    sigma: Float[Array, ""] | float,
    *,
    targets: Sequence[str],
) -> Params:
    """Return a tree whose target norm scales are s + sigma * Z, Z ~ N(0, 1), in float32.

    `params` stays as it is; all other leaves are shared with it. Z depends on the key and on the
    name of the norm, and is independent over layers and channels. sigma = 0 returns the values
    of the scales bit for bit.

    Differs from QeRL: float32, where bfloat16 rounds the noise of the last stages away; a fresh
    tree, so that noise cannot pile up; the final norm only when named.

    Raises:
        ValueError: a target that matches no norm (see `matched_norms`).
    """
    weights = flatten_weights(params)
    noisy = {
        name: _perturb(weights[name], jax.random.fold_in(key, _tag(name)), sigma)
        for name in matched_norms(params, targets)
    }
    return unflatten_weights(weights | noisy)


def max_relative_noise(params: Params, noisy: Params) -> Float[Array, ""]:
    """Return max |Z / w| over all norm scales: how hard the noise hits the weakest channel.

    Channel i of a normalized activation is multiplied by 1 + Z_i / w_i, so that sigma alone says
    little. inf if a scale of 0 has noise; 0 if nothing differs.
    """
    noisy_weights = flatten_weights(noisy)
    worst = jnp.zeros((), jnp.float32)
    for name, scale in flatten_weights(params).items():
        if name.endswith("norm"):
            clean = scale.astype(jnp.float32)
            noise = jnp.abs(noisy_weights[name].astype(jnp.float32) - clean)
            # Selected before dividing: a clean channel of scale 0 is 0 / 0.
            ratio = jnp.where(noise == 0, 0.0, noise / jnp.where(noise == 0, 1.0, jnp.abs(clean)))
            worst = jnp.maximum(worst, jnp.max(ratio))
    return worst


def _perturb(
    scale: Float[Array, "..."], key: Key[Array, ""], sigma: Float[Array, ""] | float
) -> Float[Array, "..."]:
    clean = scale.astype(jnp.float32)
    noise = jax.random.normal(key, clean.shape, jnp.float32)
    # The branch keeps the sign of a scale of -0.0, which adding 0 would lose.
    return jnp.where(sigma == 0, clean, clean + sigma * noise)


def _tag(name: str) -> int:
    # Python's hash() of a string changes from process to process.
    return zlib.crc32(name.encode())


def _stage(step: int, num_stages: int, total_steps: int) -> int:
    # Integers: floor(step / (M / K)) in floats can fall one stage short on a boundary.
    return min(step, total_steps - 1) * num_stages // total_steps


def _fraction(part: int, whole: int) -> float:
    return part / whole if whole > 0 else 1.0


def _geometric(start: float, end: float, fraction: float) -> float:
    # This form meets both ends exactly, and is defined where one of them is 0.
    return float(start ** (1.0 - fraction) * end**fraction)


def _decay(
    shape: Callable[[float], float],
    sigma_start: float,
    sigma_end: float,
    num_stages: int,
    total_steps: int,
) -> Schedule:
    _check(sigma_start, sigma_end, num_stages, total_steps)
    first = -(-total_steps // num_stages)  # the first step of stage 1

    def schedule(step: int) -> float:
        step = min(step, total_steps - 1)
        if step < first:
            return 0.0
        weight = shape(_fraction(step - first, total_steps - 1 - first))
        return float((1.0 - weight) * sigma_start + weight * sigma_end)

    return schedule


def _check(sigma_start: float, sigma_end: float, num_stages: int, total_steps: int) -> None:
    for name, sigma in (("sigma_start", sigma_start), ("sigma_end", sigma_end)):
        if not (math.isfinite(sigma) and sigma >= 0):
            raise ValueError(f"aqn.{name}: {sigma} is not a finite number of at least 0")
    if num_stages < 1:
        raise ValueError(f"aqn.num_stages: {num_stages} is below 1")
    if total_steps < 1:
        raise ValueError(f"total_steps: {total_steps} is below 1")
