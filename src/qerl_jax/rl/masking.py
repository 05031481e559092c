"""Sums and means over the positions that count; the others may hold anything, NaN included."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def masked_sum(x: Float[Array, "*shape"], mask: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Sum x * mask over all positions, leaving out those of mask 0 whatever they hold.

    The mask may be real weights, such as those of `token_weights`: then this is the loss of a
    micro-batch.
    """
    # Selected, not only multiplied: 0 * NaN is NaN.
    return jnp.sum(jnp.where(mask != 0, x, 0.0) * mask)


def masked_mean(x: Float[Array, "*shape"], mask: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Average x with weights mask: sum(x * mask) / sum(mask), or 0 where the mask is all 0."""
    total = jnp.sum(mask)
    return jnp.where(total > 0, masked_sum(x, mask) / jnp.where(total > 0, total, 1.0), 0.0)
