"""The jitted generation loop: a fixed batch, static shapes, a key-value cache per layer."""

import typing
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from qerl_jax.lora import LoraAdapter
from qerl_jax.models.config import DecoderConfig
from qerl_jax.models.decoder import KV, Rope, block, embed_tokens, forward
from qerl_jax.models.head import last_logits
from qerl_jax.models.layers import attention, rms_norm, rope_tables
from qerl_jax.protocols import Params
from qerl_jax.quant import NvFp4Tensor, dequantize
from qerl_jax.sampling.filters import SamplingConfig, sample_token


@typing.no_type_check
@flax.struct.dataclass
class Completions:
    """What a rollout returns; the mask of row i is arange(completion) < lengths[i]."""

    ids: Int[Array, "batch completion"]
    logprobs: Float[Array, "batch completion"]  # of the distribution sampled, in nats
    lengths: Int[Array, " batch"]  # tokens, the end token included
    finished: Bool[Array, " batch"]  # True: ended by an end token; False: cut by the limit


@typing.no_type_check
@flax.struct.dataclass
class LoopState:
    """Everything that one generation step reads and writes."""

    step: Int[Array, ""]  # completion slots filled
    logits: Float[Array, "batch vocab"]  # for the next slot, float32
    caches: tuple[KV, ...]  # per layer: keys and values, [batch, kv_heads, slots, head_dim]
    completions: Completions


@partial(jax.jit, static_argnames=("config", "sampling", "weights"))
def generate(
    params: Params,
    adapter: LoraAdapter | None,
    prompt_ids: Int[Array, "batch prompt"],
    prompt_mask: Bool[Array, "batch prompt"],
    key: Key[Array, ""],
    sample_ids: Int[Array, " batch"],
    *,
    config: DecoderConfig,
    sampling: SamplingConfig,
    weights: Literal["expanded", "packed"] = "expanded",
) -> Completions:
    """Sample one completion for each left-padded prompt.

    Row i draws its token at position t with the key f(key, sample_ids[i], t), so a sample does
    not depend on its place in the batch. `weights` says whether NVFP4 weights are dequantized
    once (expanded: fast, needs the dense weights' memory) or at every token (packed); the
    values are the same. Runs until every row has ended or max_completion_tokens is reached.
    """
    batch = prompt_ids.shape[0]
    layers = unstack_layers(params, adapter, config=config, expand=weights == "expanded")
    hidden, (k, v) = forward(
        params, adapter, prompt_ids, prompt_mask, config=config, return_cache=True
    )
    room = ((0, 0), (0, 0), (0, sampling.max_completion_tokens), (0, 0))
    state = LoopState(
        step=jnp.int32(0),
        logits=last_logits(params, hidden[:, -1]),
        caches=tuple((jnp.pad(k[i], room), jnp.pad(v[i], room)) for i in range(config.num_layers)),
        completions=_empty_completions(batch, sampling),
    )
    sample_keys = jax.vmap(partial(jax.random.fold_in, key))(sample_ids)
    scale = 1.0 if adapter is None else adapter.scale

    def body(state: LoopState) -> LoopState:
        tokens, state = _sample_step(state, sample_keys, sampling=sampling)
        logits, caches = _decode_step(
            params, layers, state, tokens, prompt_mask, config=config, scale=scale
        )
        return state.replace(logits=logits, caches=caches, step=state.step + 1)

    running = partial(_running, sampling.max_completion_tokens)
    return jax.lax.while_loop(running, body, state).completions


def _empty_completions(batch: int, sampling: SamplingConfig) -> Completions:
    shape = (batch, sampling.max_completion_tokens)
    return Completions(
        ids=jnp.full(shape, sampling.pad_id, jnp.int32),
        logprobs=jnp.zeros(shape, jnp.float32),
        lengths=jnp.zeros((batch,), jnp.int32),
        finished=jnp.zeros((batch,), bool),
    )


def _running(limit: int, state: LoopState) -> Bool[Array, ""]:
    return (state.step < limit) & ~jnp.all(state.completions.finished)


def _sample_step(
    state: LoopState, sample_keys: Key[Array, " batch"], *, sampling: SamplingConfig
) -> tuple[Int[Array, " batch"], LoopState]:
    """Draw the token of the current slot; rows that have ended get padding."""
    done, out = state.completions.finished, state.completions
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(sample_keys, state.step)
    tokens, logprobs = sample_token(
        keys,
        state.logits,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    tokens = jnp.where(done, sampling.pad_id, tokens)
    ended = jnp.isin(tokens, jnp.array(sampling.end_ids, jnp.int32)) & ~done
    completions = Completions(
        ids=out.ids.at[:, state.step].set(tokens),
        logprobs=out.logprobs.at[:, state.step].set(jnp.where(done, 0.0, logprobs)),
        lengths=out.lengths + (~done).astype(jnp.int32),
        finished=done | ended,
    )
    return tokens, state.replace(completions=completions)


def _decode_step(
    params: Params,
    layers: Sequence[Mapping[str, Any]],
    state: LoopState,
    tokens: Int[Array, " batch"],
    prompt_mask: Bool[Array, "batch prompt"],
    *,
    config: DecoderConfig,
    scale: float,
) -> tuple[Float[Array, "batch vocab"], tuple[KV, ...]]:
    """Append one token a row to the caches and return the logits of the next slot."""
    prompt, slots = prompt_mask.shape[1], state.caches[0][0].shape[2]
    slot = prompt + state.step
    positions = jnp.sum(prompt_mask, axis=1, dtype=jnp.int32) + state.step
    rope = Rope(*rope_tables(positions[:, None], config))
    padded = jnp.pad(prompt_mask, ((0, 0), (0, slots - prompt)), constant_values=True)
    mask = (padded & (jnp.arange(slots) <= slot)[None, :])[:, None, :]
    x = embed_tokens(params, tokens[:, None])
    caches = []
    for layer, (k_cache, v_cache) in zip(layers, state.caches, strict=True):

        def attend(q, k, v, k_cache=k_cache, v_cache=v_cache):
            k_new = jax.lax.dynamic_update_slice_in_dim(k_cache, k, slot, axis=2)
            v_new = jax.lax.dynamic_update_slice_in_dim(v_cache, v, slot, axis=2)
            return attention(q, k_new, v_new, mask), (k_new, v_new)

        x, cache = block(
            x, layer["weights"], layer["pairs"], rope, attend, scale=scale, config=config
        )
        caches.append(cache)
    hidden = rms_norm(x[:, 0], params["norm"], eps=config.rms_eps, dtype=config.dtype)
    return last_logits(params, hidden), tuple(caches)


def unstack_layers(
    params: Params, adapter: LoraAdapter | None, *, config: DecoderConfig, expand: bool
) -> tuple[dict[str, Any], ...]:
    """Split stacked layers into a list, dequantizing NVFP4 weights if asked."""
    dtype = jnp.dtype(config.dtype)

    def take(leaf, index):
        return jax.tree.map(lambda array: array[index], leaf)

    def expanded(leaf):
        return dequantize(leaf, dtype=dtype) if expand and isinstance(leaf, NvFp4Tensor) else leaf

    def is_packed(leaf):
        return isinstance(leaf, NvFp4Tensor)

    pairs = {} if adapter is None else adapter.pairs
    return tuple(
        {
            "weights": jax.tree.map(expanded, take(params["layers"], i), is_leaf=is_packed),
            "pairs": take(pairs, i),
        }
        for i in range(config.num_layers)
    )
