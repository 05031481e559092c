"""From hidden states to logits, log-probabilities and entropies, in chunks of rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qerl_jax.models.config import DecoderConfig
from qerl_jax.models.layers import matmul_precision
from qerl_jax.protocols import Params


def head_weight(params: Params) -> Float[Array, "vocab embed"]:
    """Return the head: its own matrix, or the embedding when they are tied."""
    return params["lm_head"] if "lm_head" in params else params["embed_tokens"]


@jax.custom_vjp
def head_logits(
    hidden: Float[Array, "rows embed"], head: Float[Array, "vocab embed"]
) -> Float[Array, "rows vocab"]:
    """Multiply by the frozen head with float32 results, whatever the dtype of the inputs."""
    return jnp.einsum(
        "re,ve->rv",
        hidden,
        head.astype(hidden.dtype),
        precision=matmul_precision(hidden.dtype),
        preferred_element_type=jnp.float32,
    )


def _head_forward(hidden, head):
    return head_logits(hidden, head), (head, jnp.zeros((0,), hidden.dtype))


def _head_backward(saved, gradient):
    # In the dtype of the activations: a float32 cotangent would turn the whole head to float32.
    head, like = saved
    narrow = gradient.astype(like.dtype)
    back = jnp.einsum(
        "rv,ve->re", narrow, head.astype(like.dtype), precision=matmul_precision(like.dtype)
    )
    return back, jnp.zeros_like(head)


head_logits.defvjp(_head_forward, _head_backward)


def map_rows(read: Callable[..., Any], rows: tuple[Array, ...], *, chunk: int) -> Any:
    """Apply `read(*rows)` to chunks of at most `chunk` rows, one after the other.

    `rows` are arrays [rows, ...] and so are the leaves of the result. The last chunk is filled
    up with zeros, whose results are dropped.
    """
    count = rows[0].shape[0]
    chunk = min(chunk, count)

    def split(array: Array) -> Array:
        padded = jnp.pad(array, ((0, -count % chunk), *[(0, 0)] * (array.ndim - 1)))
        return padded.reshape(-1, chunk, *array.shape[1:])

    results = jax.lax.map(lambda parts: read(*parts), tuple(map(split, rows)))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], results)


def token_logprobs(
    params: Params,
    hidden: Float[Array, "batch time embed"],
    targets: Int[Array, "batch time"],
    *,
    temperature: float,
    config: DecoderConfig,
) -> tuple[Float[Array, "batch time"], Float[Array, "batch time"]]:
    """Log-probability of each target and entropy of each full distribution, in float32 nats.

    log p = log_softmax(logits / temperature)[target]

    At most `config.logits_chunk` rows of logits exist at once, in the backward pass too.
    """
    read = jax.checkpoint(partial(_row_logprobs, head_weight(params), temperature))
    flat = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1))
    logprobs, entropy = map_rows(read, flat, chunk=config.logits_chunk)
    return logprobs.reshape(targets.shape), entropy.reshape(targets.shape)


def _row_logprobs(
    head: Float[Array, "vocab embed"],
    temperature: float,
    hidden: Float[Array, "rows embed"],
    targets: Int[Array, " rows"],
) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
    logits = head_logits(hidden, head) / temperature
    normalized = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(normalized, targets[:, None], axis=-1)[:, 0]
    entropy = -jnp.sum(jnp.exp(normalized) * normalized, axis=-1)
    return picked, jax.lax.stop_gradient(entropy)


def last_logits(params: Params, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
    """Logits of one position per row, in float32."""
    return head_logits(hidden, head_weight(params))
