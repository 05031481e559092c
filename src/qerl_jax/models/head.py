"""From hidden states to logits, log-probabilities and entropies, in chunks of rows."""

from functools import partial

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
    rows = hidden.shape[0] * hidden.shape[1]
    chunk = min(config.logits_chunk, rows)
    padding = -rows % chunk
    flat = jnp.pad(hidden.reshape(rows, -1), ((0, padding), (0, 0)))
    wanted = jnp.pad(targets.reshape(rows), (0, padding))
    read = jax.checkpoint(partial(_chunk_logprobs, head_weight(params), temperature))
    logprobs, entropy = jax.lax.map(
        read, (flat.reshape(-1, chunk, flat.shape[-1]), wanted.reshape(-1, chunk))
    )
    shape = targets.shape
    return logprobs.reshape(-1)[:rows].reshape(shape), entropy.reshape(-1)[:rows].reshape(shape)


def _chunk_logprobs(head, temperature, rows):
    hidden, targets = rows
    logits = head_logits(hidden, head) / temperature
    normalized = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(normalized, targets[:, None], axis=-1)[:, 0]
    entropy = -jnp.sum(jnp.exp(normalized) * normalized, axis=-1)
    return picked, jax.lax.stop_gradient(entropy)


def last_logits(params: Params, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
    """Logits of one position per row, in float32."""
    return head_logits(hidden, head_weight(params))
