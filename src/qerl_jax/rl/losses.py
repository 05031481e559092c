"""Policy losses: what one token costs. How tokens add up is the matter of `aggregation`.

GRPO, DAPO and Dr.GRPO share the clipped surrogate of PPO. They differ in the KL term (GRPO only),
in the aggregation, and in settings that are arguments here: epsilon_high > epsilon_low is DAPO's
clip-higher, and Dr.GRPO goes with the advantage `group_mean_only`.

Masked positions may hold anything, NaN and inf included: they cost 0 and have gradient 0.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qerl_jax.protocols import TokenLossFn
from qerl_jax.rl.kl import KL_ESTIMATORS, bound_log_ratio

TokenStatistics = dict[str, Array]  # name -> [batch, completion]


class PolicyLoss(NamedTuple):
    """A token loss, and the aggregation and the advantage that its paper pairs it with."""

    token_loss: TokenLossFn
    aggregation: str
    advantage: str


def clipped_surrogate(
    log_ratio: Float[Array, "batch completion"],
    advantages: Float[Array, " batch"],
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> Float[Array, "batch completion"]:
    """Return min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A), to be maximized.

    rho = exp(log_ratio), with log_ratio clamped to +-20 so that nothing overflows.

    Reference: Schulman et al. 2017 (arXiv:1707.06347), equation 7.
    """
    ratio = jnp.exp(bound_log_ratio(log_ratio))
    gain = ratio * advantages[:, None]
    clipped_gain = jnp.clip(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high) * advantages[:, None]
    # Not jnp.minimum, which splits the gradient at a tie: on-policy every token is one.
    return jnp.where(gain <= clipped_gain, gain, clipped_gain)


def grpo_token_loss(
    logprobs: Float[Array, "batch completion"],
    old_logprobs: Float[Array, "batch completion"],
    ref_logprobs: Float[Array, "batch completion"] | None,
    advantages: Float[Array, " batch"],
    completion_mask: Float[Array, "batch completion"],
    *,
    epsilon_low: float,
    epsilon_high: float,
    beta: float = 0.0,
    kl_estimator: str = "k3",
) -> tuple[Float[Array, "batch completion"], TokenStatistics]:
    """Return -clipped_surrogate + beta * KL(policy || reference), per token.

    Statistics: ratio (1 at masked positions), clipped_low and clipped_high (1 where the bound
    acts: the gradient of that token is 0), and kl if ref_logprobs are given.

    Raises:
        ValueError: beta is not 0 and ref_logprobs is None, or an unknown kl_estimator.

    Reference: Shao et al. 2024 (arXiv:2402.03300), equation 3. As there, the KL is not weighted
    by the ratio.
    """
    if beta != 0 and ref_logprobs is None:
        raise ValueError(f"loss.beta: {beta} needs ref_logprobs, got None")
    if kl_estimator not in KL_ESTIMATORS:
        names = ", ".join(sorted(KL_ESTIMATORS))
        raise ValueError(f'loss.kl_estimator: "{kl_estimator}" is not one of {names}')
    live = completion_mask > 0
    loss, statistics = _surrogate_loss(
        logprobs, old_logprobs, advantages, live, epsilon_low=epsilon_low, epsilon_high=epsilon_high
    )
    if ref_logprobs is not None:
        reference = jax.lax.stop_gradient(_zero_unless(live, ref_logprobs))
        kl = KL_ESTIMATORS[kl_estimator](_zero_unless(live, logprobs), reference)
        statistics["kl"] = jax.lax.stop_gradient(kl)
        loss = loss + beta * kl
    return loss, statistics


def dapo_token_loss(
    logprobs: Float[Array, "batch completion"],
    old_logprobs: Float[Array, "batch completion"],
    ref_logprobs: Float[Array, "batch completion"] | None,
    advantages: Float[Array, " batch"],
    completion_mask: Float[Array, "batch completion"],
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> tuple[Float[Array, "batch completion"], TokenStatistics]:
    """Return -clipped_surrogate per token, without KL; the paper uses epsilons 0.2 and 0.28.

    Statistics as in `grpo_token_loss`, without kl; ref_logprobs is ignored.

    Reference: Yu et al. 2025 (arXiv:2503.14476), sections 2.3 (no KL) and 3.1 (clip-higher).
    """
    return _surrogate_loss(
        logprobs,
        old_logprobs,
        advantages,
        completion_mask > 0,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
    )


def dr_grpo_token_loss(
    logprobs: Float[Array, "batch completion"],
    old_logprobs: Float[Array, "batch completion"],
    ref_logprobs: Float[Array, "batch completion"] | None,
    advantages: Float[Array, " batch"],
    completion_mask: Float[Array, "batch completion"],
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> tuple[Float[Array, "batch completion"], TokenStatistics]:
    """Return -clipped_surrogate per token, without KL.

    The same token loss as DAPO's: Dr.GRPO is this with fixed_length_mean and with advantages
    that are not divided by the deviation. Statistics as in `dapo_token_loss`.

    Reference: Liu et al. 2025 (arXiv:2503.20783), section 3.2.
    """
    return dapo_token_loss(
        logprobs,
        old_logprobs,
        ref_logprobs,
        advantages,
        completion_mask,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
    )


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "dapo": PolicyLoss(dapo_token_loss, "token_mean", "group_bessel"),
    "dr_grpo": PolicyLoss(dr_grpo_token_loss, "fixed_length_mean", "group_mean_only"),
    "grpo": PolicyLoss(grpo_token_loss, "sequence_mean", "group_bessel"),
}


def truncated_importance_weights(
    trainer_logprobs: Float[Array, "batch completion"],
    sampler_logprobs: Float[Array, "batch completion"],
    mask: Float[Array, "batch completion"],
    *,
    cap: float,
) -> Float[Array, "batch completion"]:
    """Return min(exp(trainer - sampler), cap) per token, 1 at masked positions; no gradient.

    Multiplies the token loss when the sampler's distribution is not the trainer's (noise in the
    rollout only, other kernels). `trainer_logprobs` are those of the policy that sampled, that
    is old_logprobs recomputed by the trainer, not those of the policy under update.

    Raises:
        ValueError: cap is not above 0.

    Reference: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training" (truncated importance sampling); TRL uses a cap of 2.
    """
    if not cap > 0:
        raise ValueError(f"loss.importance_cap: {cap} is not above 0")
    live = mask > 0
    log_ratio = _zero_unless(live, trainer_logprobs) - _zero_unless(live, sampler_logprobs)
    weights = jnp.where(live, jnp.minimum(jnp.exp(log_ratio), cap), 1.0)
    return jax.lax.stop_gradient(weights)


def _zero_unless(
    live: Bool[Array, "batch completion"], x: Float[Array, "batch completion"]
) -> Float[Array, "batch completion"]:
    return jnp.where(live, x, 0.0)


def _surrogate_loss(
    logprobs: Float[Array, "batch completion"],
    old_logprobs: Float[Array, "batch completion"],
    advantages: Float[Array, " batch"],
    live: Bool[Array, "batch completion"],
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> tuple[Float[Array, "batch completion"], TokenStatistics]:
    # Replaced before the exp as well as after it: a jnp.where around a NaN hides its value and
    # not its gradient.
    old = jax.lax.stop_gradient(_zero_unless(live, old_logprobs))
    log_ratio = _zero_unless(live, logprobs) - old
    advantages = jax.lax.stop_gradient(advantages)
    surrogate = clipped_surrogate(
        log_ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high
    )
    ratio = jnp.exp(bound_log_ratio(log_ratio))
    too_low = (ratio < 1.0 - epsilon_low) & (advantages[:, None] < 0)
    too_high = (ratio > 1.0 + epsilon_high) & (advantages[:, None] > 0)
    statistics = {
        "ratio": ratio,
        "clipped_low": too_low.astype(jnp.float32),
        "clipped_high": too_high.astype(jnp.float32),
    }
    return _zero_unless(live, -surrogate), jax.lax.stop_gradient(statistics)
