"""From token losses to the loss of an optimizer batch.

The weights of all tokens are computed once for the WHOLE optimizer batch. Micro-batches then only
sum weights * token losses, so that the update does not depend on how the batch is cut:

    loss = sum over micro-batches of masked_sum(token_losses, weights)

Differs from QeRL, whose "bnpo" averages the token means of the micro-batches: token losses [1]
and [2, 2, 2, 2] in two micro-batches give it 1.5, where the token mean is 1.8.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float


def token_weights(
    completion_mask: Float[Array, "batch completion"],
    *,
    aggregation: str,
    max_completion_tokens: int,
) -> Float[Array, "batch completion"]:
    """Return the weight of each token loss in the loss of the batch.

    Args:
        completion_mask: 1 for tokens that are trained on, of the whole optimizer batch.
        aggregation: name in AGGREGATIONS.
        max_completion_tokens: the limit of sampling, in tokens; used by fixed_length_mean.

    Raises:
        ValueError: an unknown aggregation.
    """
    if aggregation not in AGGREGATIONS:
        names = ", ".join(sorted(AGGREGATIONS))
        raise ValueError(f'loss.aggregation: "{aggregation}" is not one of {names}')
    return AGGREGATIONS[aggregation](completion_mask.astype(jnp.float32), max_completion_tokens)


def _token_mean(mask: Float[Array, "batch completion"], max_tokens: int) -> Array:
    """mask / tokens of the batch: every token counts the same (DAPO; TRL "dapo")."""
    return mask / jnp.maximum(jnp.sum(mask), 1.0)


def _sequence_mean(mask: Float[Array, "batch completion"], max_tokens: int) -> Array:
    """mask / (tokens of the row * rows): every row counts the same (GRPO; TRL "grpo").

    Empty rows count among the rows, as in TRL: masking a truncated completion removes its part
    of the loss and does not make the others weigh more.
    """
    lengths = jnp.sum(mask, axis=1, keepdims=True)
    return mask / (jnp.maximum(lengths, 1.0) * mask.shape[0])


def _fixed_length_mean(mask: Float[Array, "batch completion"], max_tokens: int) -> Array:
    """mask / (rows * max_completion_tokens): no length in the divisor (Dr.GRPO)."""
    return mask / (mask.shape[0] * max_tokens)


AGGREGATIONS: Mapping[str, Callable[..., Array]] = {
    "token_mean": _token_mean,
    "sequence_mean": _sequence_mean,
    "fixed_length_mean": _fixed_length_mean,
}
