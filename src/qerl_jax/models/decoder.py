"""One decoder for Qwen2/2.5, Qwen3, Llama 3.x and SmolLM2: forward passes over whole sequences.

Training and scoring scan the stacked layers, so compile time and memory do not grow with depth;
token-by-token decoding (sampling/generate.py) runs the same `block` over a list of layers.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from qerl_jax.lora import LoraAdapter
from qerl_jax.models.config import DecoderConfig
from qerl_jax.models.layers import apply_rope, attention, linear, rms_norm, rope_tables, swiglu
from qerl_jax.protocols import Params

# Keys and values of one layer, and of all layers stacked.
KV = tuple[
    Float[Array, "batch kv_heads slots head_dim"], Float[Array, "batch kv_heads slots head_dim"]
]
StackedKV = tuple[
    Float[Array, "layers batch kv_heads time head_dim"],
    Float[Array, "layers batch kv_heads time head_dim"],
]


class Rope(NamedTuple):
    """Rotations of the tokens of one call."""

    cos: Float[Array, "batch time head_dim"]
    sin: Float[Array, "batch time head_dim"]


def embed_tokens(
    params: Params, tokens: Int[Array, "batch time"]
) -> Float32[Array, "batch time embed"]:
    """Look up token embeddings: the start of the residual stream, which is float32."""
    return params["embed_tokens"][tokens].astype(jnp.float32)


def project(
    x: Float[Array, "batch time k"],
    name: str,
    layer: Mapping[str, Any],
    pairs: Mapping[str, Mapping[str, Array]],
    scale: float,
) -> Float32[Array, "batch time n"]:
    """Apply the projection `name` of a layer with its bias and its adapter, if it has them."""
    weights = layer[name]
    return linear(x, weights["weight"], bias=weights.get("bias"), pair=pairs.get(name), scale=scale)


def qkv(
    x: Float[Array, "batch time embed"],
    layer: Mapping[str, Any],
    pairs: Mapping[str, Mapping[str, Array]],
    rope: Rope,
    *,
    scale: float,
    config: DecoderConfig,
) -> tuple[Float[Array, "batch time q_heads head_dim"], *KV]:
    """Project to queries [batch, time, heads, dim] and to keys and values in cache layout."""
    batch, time, _ = x.shape
    shape = (batch, time, -1, config.head_dim)
    q, k, v = (
        project(x, name, layer, pairs, scale).reshape(shape)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], eps=config.rms_eps, dtype=jnp.float32)
        k = rms_norm(k, layer["k_norm"], eps=config.rms_eps, dtype=jnp.float32)
    q, k = (apply_rope(heads, *rope, dtype=x.dtype) for heads in (q, k))
    return q, k.swapaxes(1, 2), v.astype(x.dtype).swapaxes(1, 2)


def block(
    x: Float32[Array, "batch time embed"],
    layer: Mapping[str, Any],
    pairs: Mapping[str, Mapping[str, Array]],
    rope: Rope,
    attend: Callable[..., tuple[Float[Array, "batch time q_heads head_dim"], Any]],
    *,
    scale: float,
    config: DecoderConfig,
) -> tuple[Float32[Array, "batch time embed"], Any]:
    """Run one decoder block; `attend(q, k, v) -> (output, kept)` decides what the queries see.

    The residual stream stays float32: rounding it to bfloat16 in every block is the largest part
    of what sampler and trainer would otherwise disagree on.
    """
    dtype = jnp.dtype(config.dtype)
    normed = rms_norm(x, layer["input_layernorm"], eps=config.rms_eps, dtype=dtype)
    mixed, kept = attend(*qkv(normed, layer, pairs, rope, scale=scale, config=config))
    x = x + project(mixed.reshape(*x.shape[:2], -1), "o_proj", layer, pairs, scale)
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=config.rms_eps, dtype=dtype)
    gate = project(normed, "gate_proj", layer, pairs, scale)
    up = project(normed, "up_proj", layer, pairs, scale)
    return x + project(swiglu(gate, up, dtype=dtype), "down_proj", layer, pairs, scale), kept


def token_positions(valid: Bool[Array, "batch time"]) -> Int[Array, "batch time"]:
    """Positions that count valid tokens from 0, so that left padding does not shift a prompt."""
    return jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)


def causal_mask(valid: Bool[Array, "batch time"]) -> Bool[Array, "batch time time"]:
    """Let each token see the valid tokens up to itself."""
    time = valid.shape[1]
    return jnp.tril(jnp.ones((time, time), bool))[None] & valid[:, None, :]


def forward(
    params: Params,
    adapter: LoraAdapter | None,
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    *,
    config: DecoderConfig,
    return_cache: bool = False,
) -> tuple[Float[Array, "batch time embed"], StackedKV | None]:
    """Run the decoder over whole sequences, padded on either side.

    Returns the hidden states after the final norm and, if asked, the keys and values stacked
    over layers, [layers, batch, kv_heads, time, head_dim]. Values at padding are meaningless.
    """
    rope = Rope(*rope_tables(token_positions(valid), config))
    mask = causal_mask(valid)
    pairs, scale = ({}, 1.0) if adapter is None else (adapter.pairs, adapter.scale)

    def attend(q, k, v):
        return attention(q, k, v, mask), ((k, v) if return_cache else None)

    def step(x, stacked):
        layer, layer_pairs = stacked
        return block(x, layer, layer_pairs, rope, attend, scale=scale, config=config)

    if config.remat and not return_cache:
        step = jax.checkpoint(step, policy=jax.checkpoint_policies.nothing_saveable)
    x = embed_tokens(params, tokens)
    x, cache = jax.lax.scan(step, x, (params["layers"], pairs))
    return rms_norm(x, params["norm"], eps=config.rms_eps, dtype=config.dtype), cache
