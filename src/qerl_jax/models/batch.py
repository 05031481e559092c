"""Rows of prompt and completion, and the trainer's log-probabilities of the completions."""

import typing

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qerl_jax.lora import LoraAdapter
from qerl_jax.models.config import DecoderConfig
from qerl_jax.models.decoder import forward
from qerl_jax.models.head import token_logprobs
from qerl_jax.protocols import Params


@typing.no_type_check
@flax.struct.dataclass
class TokenBatch:
    """Prompts padded on the left, completions on the right; masks come from lengths."""

    prompt_ids: Int[Array, "batch prompt"]
    prompt_mask: Bool[Array, "batch prompt"]
    completion_ids: Int[Array, "batch completion"]
    completion_mask: Bool[Array, "batch completion"]  # up to and with the first end token


def completion_logprobs(
    params: Params,
    adapter: LoraAdapter | None,
    batch: TokenBatch,
    *,
    config: DecoderConfig,
    temperature: float,
) -> tuple[Float[Array, "batch completion"], Float[Array, "batch completion"]]:
    """Log-probability of every completion token and entropy of its distribution, in nats.

    Both are of softmax(logits / temperature) over the full vocabulary; values at masked
    positions are finite and meaningless.
    """
    tokens = jnp.concatenate([batch.prompt_ids, batch.completion_ids], axis=1)
    valid = jnp.concatenate([batch.prompt_mask, batch.completion_mask], axis=1)
    hidden, _ = forward(params, adapter, tokens, valid, config=config)
    first = batch.prompt_ids.shape[1] - 1  # the last prompt token predicts the first completion
    last = first + batch.completion_ids.shape[1]
    return token_logprobs(
        params, hidden[:, first:last], batch.completion_ids, temperature=temperature, config=config
    )
