"""From float32 logits to one sampled token and the log-probability it had."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn; hashable, so it can be a static argument of jit."""

    max_completion_tokens: int
    end_ids: tuple[int, ...]  # any of them ends a completion, and belongs to it
    pad_id: int  # written after the end
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # keep the k largest logits and ties with the k-th; 0: off
    top_p: float = 1.0  # keep the fewest tokens of at least this mass; 1: off
    min_p: float = 0.0  # keep tokens of at least this share of the largest; 0: off


def filter_logits(
    logits: Float[Array, "batch vocab"], *, top_k: int, top_p: float, min_p: float
) -> Float[Array, "batch vocab"]:
    """Set the logits that the filters drop to -inf; the largest always stays.

    The filters act in the order top-k, top-p, min-p, each on what the one before it kept, after
    the temperature has been applied (the order of Hugging Face transformers).
    """
    vocab = logits.shape[-1]
    if 0 < top_k < vocab:
        kth = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= kth, logits, -jnp.inf)
    if top_p < 1.0:
        ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        mass_before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
        mass_before = jnp.pad(mass_before[:, :-1], ((0, 0), (1, 0)))
        # The first entry has no mass before it, so at least one token is kept.
        count = jnp.sum(mass_before < top_p, axis=-1, keepdims=True)
        cutoff = jnp.take_along_axis(ordered, count - 1, axis=-1)
        # Of tokens tied at the cut-off, only as many as the mass needs: the first ones.
        tied = logits == cutoff
        room = count - jnp.sum(logits > cutoff, axis=-1, keepdims=True)
        kept = (logits > cutoff) | (tied & (jnp.cumsum(tied, axis=-1) <= room))
        logits = jnp.where(kept, logits, -jnp.inf)
    if min_p > 0.0:
        floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)
        logits = jnp.where(logits >= floor, logits, -jnp.inf)
    return logits


def sample_token(
    keys: Key[Array, " batch"],
    logits: Float[Array, "batch vocab"],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """Draw one token a row with its own key; return it and its log-probability in nats.

    token = argmax(filtered logits / temperature + Gumbel noise)

    The log-probability is of the distribution that was sampled, temperature and filters
    included. At temperature 0 the choice is greedy and unfiltered, and the log-probability is
    that of the model at temperature 1 (that of the point mass would always be 0).
    """
    if temperature == 0.0:
        tokens = jnp.argmax(logits, axis=-1)
        kept = logits
    else:
        kept = filter_logits(logits / temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        # JAX's quick mode ends at 16: no token more than 20 nats below the best could be drawn.
        draw = partial(jax.random.gumbel, shape=logits.shape[-1:], dtype=jnp.float32, mode="high")
        noise = jax.vmap(draw)(keys)
        tokens = jnp.argmax(kept + noise, axis=-1)
    logprobs = jax.nn.log_softmax(kept, axis=-1)
    picked = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), picked
