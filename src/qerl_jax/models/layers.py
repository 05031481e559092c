"""The parts of a decoder block as pure functions; `linear` is the one place that knows NVFP4."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from qerl_jax.lora import lora_delta
from qerl_jax.models.config import DecoderConfig, Llama3RopeScaling
from qerl_jax.quant import NvFp4Tensor, dequantize


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Ask for true float32 products: GPUs otherwise round the inputs to TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


@jax.custom_vjp
def matmul(x: Float[Array, "*batch k"], weight: Float[Array, "n k"]) -> Float[Array, "*batch n"]:
    """Multiply by a weight, y = x W^T, in the dtype of `x` with a float32 result.

    The one rounding is left to whoever uses the result, so that sampler and trainer, whose
    products may be split differently, round nearly equal numbers.
    """
    return jnp.einsum(
        "...k,nk->...n",
        x,
        weight,
        precision=matmul_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )


def _matmul_forward(x, weight):
    return matmul(x, weight), (x, weight)


def _matmul_backward(saved, gradient):
    # In the dtype of the activations: a float32 operand would turn the whole product to float32.
    x, weight = saved
    narrow = gradient.astype(x.dtype)
    settings = {"precision": matmul_precision(x.dtype)}
    to_x = jnp.einsum("...n,nk->...k", narrow, weight, **settings)
    to_weight = jnp.einsum("...n,...k->nk", narrow, x, **settings)
    return to_x, to_weight.astype(weight.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def linear(
    x: Float[Array, "*batch k"],
    weight: Float[Array, "n k"] | NvFp4Tensor,
    *,
    bias: Float[Array, " n"] | None = None,
    pair: Mapping[str, Array] | None = None,
    scale: float = 1.0,
) -> Float32[Array, "*batch n"]:
    """Multiply by a dense or NVFP4 weight, add the bias and the low-rank update.

    y = x W^T + bias + scale (x A) B

    Products are computed in the dtype of `x` and added up in float32.
    """
    if isinstance(weight, NvFp4Tensor):
        dense = dequantize(weight, dtype=x.dtype)
    else:
        dense = weight.astype(x.dtype)
    y = matmul(x, dense)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)
    if pair is not None:
        y = y + lora_delta(x, pair, scale=scale)
    return y


def rms_norm(
    x: Float[Array, "*batch embed"],
    scale: Float[Array, " embed"],
    *,
    eps: float,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "*batch embed"]:
    """Normalize by the root mean square, in float32, and round once to `dtype`.

    y = scale * x / sqrt(mean(x^2) + eps)

    The scale multiplies in float32 so that small noise on it is not rounded away.
    """
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    wide_scale = jnp.broadcast_to(scale.astype(jnp.float32), wide.shape)
    return (wide * inverse * wide_scale).astype(dtype)


def rope_frequencies(config: DecoderConfig) -> Float[Array, " half"]:
    """Angular frequencies of the rotary embedding, in radians per token."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponent)
    if config.rope_scaling is None:
        return frequencies
    return _llama3_frequencies(frequencies, config.rope_scaling)


def _llama3_frequencies(
    frequencies: Float[Array, " half"], scaling: Llama3RopeScaling
) -> Float[Array, " half"]:
    """Stretch long wavelengths by `factor`, keep short ones, blend in between (Llama 3.1)."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * jnp.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rope_tables(
    positions: Int[Array, "batch time"], config: DecoderConfig
) -> tuple[Float[Array, "batch time head_dim"], Float[Array, "batch time head_dim"]]:
    """Cosine and sine of every rotation, in float32, in the two-halves layout."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)[None, None, :]
    doubled = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(doubled), jnp.sin(doubled)


def apply_rope(
    x: Float[Array, "batch time heads head_dim"],
    cos: Float[Array, "batch time head_dim"],
    sin: Float[Array, "batch time head_dim"],
    *,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "batch time heads head_dim"]:
    """Rotate the pairs (i, i + head_dim/2), in float32, and round once to `dtype`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    straight = jnp.concatenate([first, second], axis=-1)
    return (straight * cos[:, :, None, :] + turned * sin[:, :, None, :]).astype(dtype)


def attention(
    q: Float[Array, "batch time q_heads head_dim"],
    k: Float[Array, "batch kv_heads slots head_dim"],
    v: Float[Array, "batch kv_heads slots head_dim"],
    mask: Bool[Array, "batch time slots"],
) -> Float[Array, "batch time q_heads head_dim"]:
    """Grouped-query attention with float32 scores and softmax.

    A query that may see nothing (padding) gets a finite, meaningless average.
    """
    batch, time, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, time, kv_heads, q_heads // kv_heads, head_dim)
    precision = matmul_precision(q.dtype)
    scores = jnp.einsum(
        "btkgd,bksd->bkgts", grouped, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = scores * head_dim**-0.5
    scores = jnp.where(mask[:, None, None, :, :], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgts,bksd->btkgd", weights, v, precision=precision)
    return out.reshape(batch, time, q_heads, head_dim)


def swiglu(
    gate: Float32[Array, "*batch ffn"],
    up: Float32[Array, "*batch ffn"],
    *,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "*batch ffn"]:
    """Gate the MLP, silu(gate) * up, in float32, and round once to `dtype`."""
    return (jax.nn.silu(gate) * up).astype(dtype)
