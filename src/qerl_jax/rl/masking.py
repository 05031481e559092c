"""Sums over the positions that count; the others may hold anything, NaN included."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def masked_sum(x: Float[Array, "*shape"], mask: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Sum x * mask over all positions, leaving out those of mask 0 whatever they hold.

    The mask may be real weights, such as those of `token_weights`: then this is the loss of a
    micro-batch.
    """
    # Selected, not only multiplied: 0 * NaN is NaN.
    return jnp.sum(jnp.where(mask != 0, x, 0.0) * mask)
