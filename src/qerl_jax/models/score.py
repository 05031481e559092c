"""Log-probabilities and largest logits of given tokens."""

import typing
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qerl_jax.lora import LoraAdapter
from qerl_jax.models.config import DecoderConfig
from qerl_jax.models.decoder import forward
from qerl_jax.models.head import head_logits, head_weight, map_rows
from qerl_jax.protocols import Params


@typing.no_type_check
@flax.struct.dataclass
class Scores:
    """What the model says at each position about the next token."""

    next_logprobs: Float[Array, "batch time"]  # of the next given token; last one meaningless
    top_ids: Int[Array, "batch time top"]
    top_logits: Float[Array, "batch time top"]  # float32, before the temperature


@partial(jax.jit, static_argnames=("config", "top_k"))
def score_tokens(
    params: Params,
    adapter: LoraAdapter | None,
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    *,
    config: DecoderConfig,
    temperature: float | Float[Array, ""],
    top_k: int,
) -> Scores:
    """Score sequences padded on the right, `config.logits_chunk` rows of logits at a time.

    next_logprobs[t] = log_softmax(logits[t] / temperature)[tokens[t + 1]]
    """
    hidden, _ = forward(params, adapter, tokens, valid, config=config)

    def read(hidden, targets):
        logits = head_logits(hidden, head_weight(params))
        logprobs = jax.nn.log_softmax(logits / temperature, axis=-1)
        picked = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
        return picked, *jax.lax.top_k(logits, top_k)

    targets = jnp.roll(tokens, -1, axis=1)
    flat = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1))
    picked, top_logits, top_ids = map_rows(read, flat, chunk=config.logits_chunk)
    return Scores(
        next_logprobs=picked.reshape(tokens.shape),
        top_ids=top_ids.reshape(*tokens.shape, top_k),
        top_logits=top_logits.reshape(*tokens.shape, top_k),
    )
