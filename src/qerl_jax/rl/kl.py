"""Estimators of KL(policy || reference) from one sampled token.

Let d = logprobs - ref_logprobs for a token sampled from the policy. As *values* k1 and k3 are
unbiased and k2 is close for near policies. As *loss terms* they differ more: the expected
gradient of k1 is zero, that of k2 is the gradient of the reverse KL, and that of k3 on the
logits is p - ref, near the reverse KL only for near policies.

Reference: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_LOG_RATIO = 20.0  # nats; exp(20) = 4.9e8 still leaves a finite float32 loss


def bound_log_ratio(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Clamp a log-ratio to +-MAX_LOG_RATIO before exp; beyond it the gradient is 0, not NaN."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_k1(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Return d, the log-ratio itself.

    For monitoring. As a loss term its expected gradient is 0 whatever the reference is: it adds
    noise and no pull.
    """
    return logprobs - ref_logprobs


def kl_k2(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Return d^2 / 2; as a loss term its expected gradient is that of the reverse KL."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def kl_k3(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Return exp(-d) + d - 1, which is never negative; d is clamped by `bound_log_ratio`.

    Reference: Shao et al. 2024 (arXiv:2402.03300), equation 4.
    """
    d = bound_log_ratio(logprobs - ref_logprobs)
    return jnp.exp(-d) + d - 1.0


KL_ESTIMATORS: Mapping[str, Callable[..., Array]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
