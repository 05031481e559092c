"""Shapes of a decoder's parameters, and random ones."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from qerl_jax.models.config import DecoderConfig
from qerl_jax.protocols import Params

_NORM_SUFFIXES = ("norm", "layernorm")


def abstract_params(config: DecoderConfig, *, dtype=jnp.bfloat16) -> Params:
    """Build the tree of dense parameters as shapes; norm scales and biases are float32.

    Linear weights are [layers, out, in], as in Hugging Face files but stacked.
    """

    def leaf(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct((config.num_layers, *shape), jnp.dtype(dtype))

    q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {
        "q_proj": (q, config.embed),
        "k_proj": (kv, config.embed),
        "v_proj": (kv, config.embed),
        "o_proj": (config.embed, q),
        "gate_proj": (config.ffn, config.embed),
        "up_proj": (config.ffn, config.embed),
        "down_proj": (config.embed, config.ffn),
    }
    layers = {name: {"weight": leaf(*size)} for name, size in sizes.items()}
    for name in ("q_proj", "k_proj", "v_proj") if config.qkv_bias else ():
        layers[name]["bias"] = leaf(sizes[name][0], dtype=jnp.float32)
    for name in ("input_layernorm", "post_attention_layernorm"):
        layers[name] = leaf(config.embed, dtype=jnp.float32)
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        layers[name] = leaf(config.head_dim, dtype=jnp.float32)
    table = jax.ShapeDtypeStruct((config.vocab_size, config.embed), jnp.dtype(dtype))
    params = {"embed_tokens": table, "layers": layers}
    params["norm"] = jax.ShapeDtypeStruct((config.embed,), jnp.float32)
    return params if config.tied else {**params, "lm_head": table}


def init_params(key: Key[Array, ""], config: DecoderConfig, *, dtype=jnp.float32) -> Params:
    """Draw random parameters: N(0, 1/in) weights, N(0, 0.02^2) embeddings, ones and zeros."""
    leaves, treedef = jax.tree.flatten_with_path(abstract_params(config, dtype=dtype))
    keys = jax.random.split(key, len(leaves))

    def draw(path, leaf, leaf_key):
        name = path[-1].key
        if name.endswith(_NORM_SUFFIXES):
            return jnp.ones(leaf.shape, leaf.dtype)
        if name == "bias":
            return jnp.zeros(leaf.shape, leaf.dtype)
        std = 1 / math.sqrt(leaf.shape[-1]) if name == "weight" else 0.02
        return (std * jax.random.normal(leaf_key, leaf.shape)).astype(leaf.dtype)

    drawn = [draw(path, leaf, k) for (path, leaf), k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, drawn)
