"""The policy of a step: base parameters, trained norm scales over them, noise over those."""

import jax
from jaxtyping import Array, Float, Key

from qerl_jax.aqn import perturb_norm_scales
from qerl_jax.lora import Trainable, overlay_norms
from qerl_jax.protocols import Params


def policy_params(
    params: Params,
    trainable: Trainable,
    noise_key: Key[Array, ""],
    sigma: Float[Array, ""],
    *,
    noise_targets: tuple[str, ...] | None,
) -> Params:
    """Overlay the trained norm scales, then add noise to `noise_targets` (None: no noise).

    A new tree: `params` stay as they are, so noise never accumulates. Sampler and trainer call
    this with the same key and sigma to be the same policy.
    """
    policy = overlay_norms(params, trainable)
    if noise_targets is None:
        return policy
    return perturb_norm_scales(policy, noise_key, sigma, targets=noise_targets)


def step_keys(key: Key[Array, ""], step: int) -> tuple[Key[Array, ""], Key[Array, ""]]:
    """Derive the (noise, sampling) keys of a training step from the run's key."""
    noise_key, sampling_key = jax.random.split(jax.random.fold_in(key, step))
    return noise_key, sampling_key
