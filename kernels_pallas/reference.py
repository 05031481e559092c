"""NVFP4 operations in plain jax.numpy: the oracle of the kernels, and the path without them."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Float32, UInt8

from kernels_pallas import exact
from kernels_pallas.format import BLOCK_SIZE, unpack_codes

_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
_E2M1_HALVES = 0xC8643210  # nibble i: twice the magnitude of code i


def local_scales(
    block_scales: Float8e4m3fn[Array, "*stack n blocks"], global_scale: Float32[Array, "*stack"]
) -> Float32[Array, "*stack n blocks"]:
    """Return block_scale / global_scale, correctly rounded to float32."""
    # A block scale has 256 possible values. To divide these and look them up is cheaper than
    # an exact division for each block.
    shape = (*global_scale.shape, len(_E4M3_VALUES))
    numerators = jnp.broadcast_to(np.nan_to_num(_E4M3_VALUES), shape)
    quotients = exact.divide(numerators, jnp.broadcast_to(global_scale[..., None], shape))
    quotients = jnp.where(jnp.broadcast_to(np.isnan(_E4M3_VALUES), shape), jnp.nan, quotients)
    codes = lax.bitcast_convert_type(block_scales, jnp.uint8).astype(jnp.int32)
    flat = codes.reshape(*global_scale.shape, -1)
    local = jnp.take_along_axis(quotients, flat, axis=-1, mode="promise_in_bounds")
    return local.reshape(block_scales.shape)


def dequantize_reference(
    packed: UInt8[Array, "*stack n half_k"],
    block_scales: Float8e4m3fn[Array, "*stack n blocks"],
    global_scale: Float32[Array, "*stack"],
    *,
    dtype: DTypeLike = jnp.bfloat16,
) -> Float[Array, "*stack n k"]:
    """Decode a weight: e2m1 * (block_scale / global_scale) in float32, then rounded to `dtype`.

    Exact on every backend, but for results below 1.2e-38, which XLA flushes to zero on CPU.
    """
    codes = unpack_codes(packed)
    halves = _e2m1_halves(codes).reshape(*block_scales.shape, BLOCK_SIZE)
    # Without the barrier XLA computes the scale again for each of the 16 values.
    half_scales = lax.optimization_barrier(0.5 * local_scales(block_scales, global_scale))
    return (halves * half_scales[..., None]).reshape(codes.shape).astype(dtype)


def nvfp4_matmul_reference(
    x: Float[Array, "*batch k"],
    packed: UInt8[Array, "n k//2"],
    block_scales: Float8e4m3fn[Array, "n k//16"],
    global_scale: Float32[Array, ""],
) -> Float[Array, "*batch n"]:
    """Multiply by a decoded weight: y = x W^T, with W rounded to the dtype of `x`.

    Sums are float32, the result has the dtype of `x`. It differentiates with respect to `x`.
    """
    weight = dequantize_reference(packed, block_scales, global_scale, dtype=x.dtype)
    # GPUs otherwise round float32 inputs to TF32.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jnp.einsum(
        "...k,nk->...n", x, weight, precision=precision, preferred_element_type=jnp.float32
    )
    return y.astype(x.dtype)


def _e2m1_halves(codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Return twice the value of each code; code 8 gives -0.0.

    A shift of a constant, since a table lookup is not vectorized on CPU.
    """
    wide = codes.astype(jnp.uint32)
    magnitude = (jnp.uint32(_E2M1_HALVES) >> ((wide & 7) * 4)) & 15
    bits = lax.bitcast_convert_type(magnitude.astype(jnp.int32).astype(jnp.float32), jnp.uint32)
    return lax.bitcast_convert_type(bits | ((wide & 8) << 28), jnp.float32)
