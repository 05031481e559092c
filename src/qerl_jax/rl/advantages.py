"""Advantages of the completions of a group, relative to their group.

Every function takes rewards [prompts, group] and `eps`, so that they are interchangeable.
Conventions differ between trainers; rewards [1, 0, 0, 0] give, with eps -> 0:

    group_bessel      1.5,   -0.5    TRL, tunix, verl, QeRL
    group_population  1.732, -0.577  EasyDeL
    group_mean_only   0.75,  -0.25   Dr.GRPO, prime-rl
    leave_one_out     1,     -1/3    RLOO

A group of equal rewards gives exactly 0. A two-pass mean in float32 does not: six rewards of
0.9 have a computed standard deviation of 6.5e-8, hence -0.056 with eps 1e-6. Rewards are
therefore first taken relative to the first of the group, where equal rewards are exact zeros.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def group_bessel(
    rewards: Float[Array, "prompts group"], *, eps: float = 1e-4
) -> Float[Array, "prompts group"]:
    """Return (r - mean) / (std + eps) with the standard deviation over group - 1.

    Raises:
        ValueError: a group of 1, whose deviation is not defined.

    Reference: Shao et al. 2024 (arXiv:2402.03300), section 4.1.2; divisor and eps as in TRL.
    """
    _require_pairs(rewards, "group_bessel")
    return _normalized(rewards, degrees=rewards.shape[1] - 1, eps=eps)


def group_population(
    rewards: Float[Array, "prompts group"], *, eps: float = 1e-4
) -> Float[Array, "prompts group"]:
    """Return (r - mean) / (std + eps) with the standard deviation over group; 0 in a group of 1."""
    return _normalized(rewards, degrees=rewards.shape[1], eps=eps)


def group_mean_only(
    rewards: Float[Array, "prompts group"], *, eps: float = 1e-4
) -> Float[Array, "prompts group"]:
    """Return r - mean; 0 in a group of 1. `eps` is not used: nothing is divided.

    Reference: Liu et al. 2025 (arXiv:2503.20783), section 3.2.
    """
    return _centred(rewards)


def leave_one_out(
    rewards: Float[Array, "prompts group"], *, eps: float = 1e-4
) -> Float[Array, "prompts group"]:
    """Return r_i - mean over j != i of r_j. `eps` is not used: no spread is divided by.

    Raises:
        ValueError: a group of 1, which leaves nothing.

    Reference: Ahmadian et al. 2024 (arXiv:2402.14740), the RLOO estimator.
    """
    _require_pairs(rewards, "leave_one_out")
    group = rewards.shape[1]
    return _centred(rewards) * (group / (group - 1))


ADVANTAGES: Mapping[str, Callable[..., Array]] = {
    "group_bessel": group_bessel,
    "group_population": group_population,
    "group_mean_only": group_mean_only,
    "leave_one_out": leave_one_out,
}


def informative_groups(rewards: Float[Array, "prompts group"]) -> Bool[Array, " prompts"]:
    """Tell which groups have unequal rewards; the others carry no gradient."""
    return jnp.any(rewards != rewards[:, :1], axis=1)


def _require_pairs(rewards: Float[Array, "prompts group"], name: str) -> None:
    if rewards.shape[1] < 2:
        raise ValueError(
            f"rollout.num_generations: {rewards.shape[1]} is below 2, the smallest group with a "
            f"{name} advantage"
        )


def _centred(rewards: Float[Array, "prompts group"]) -> Float[Array, "prompts group"]:
    relative = rewards.astype(jnp.float32) - rewards[:, :1].astype(jnp.float32)
    return relative - jnp.mean(relative, axis=1, keepdims=True)


def _normalized(
    rewards: Float[Array, "prompts group"], *, degrees: int, eps: float
) -> Float[Array, "prompts group"]:
    centred = _centred(rewards)
    std = jnp.sqrt(jnp.sum(centred**2, axis=1, keepdims=True) / degrees)
    # Compared with 0, not "> 0": a NaN reward must stay visible.
    return jnp.where(std == 0, 0.0, centred / jnp.where(std == 0, 1.0, std + eps))
