"""NVFP4 as compressed-tensors writes it, bit for bit: quantize, dequantize, validate.

With R the rounding to `round_to`, amax a largest magnitude, and every other step in float32:

    global_scale = R(R(1 / amax) * 2688)                       2688 = 6 * 448
    block_scale  = e4m3(min(R(block_amax / 6) * global_scale, 448)), and 0 becomes 0.125
    code         = e2m1(clamp(x / (block_scale / global_scale), -6, 6)), ties to even
    value        = e2m1 * (block_scale / global_scale)

R is float32 by default. llm-compressor computes the two scales in the dtype of the weight:
`round_to=jnp.bfloat16` gives its bytes for bfloat16 models. Either is decoded alike.
"""

import functools
import math
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Float32, UInt8

from kernels_pallas import exact
from kernels_pallas.format import BLOCK_SIZE, E2M1_MAX, E4M3_MAX, pack_codes
from kernels_pallas.reference import dequantize_reference, local_scales

Weight = Array | np.ndarray

_ZERO_BLOCK_SCALE = 0.125
# Midpoints between neighbouring magnitudes; a tie goes to the even code.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


@typing.no_type_check
@struct.dataclass
class NvFp4Tensor:
    """A weight of shape [*stack, n, k] in 4.5 bits a value; layout in kernels_pallas/format.py.

    value = e2m1 * (block_scale / global_scale), so `global_scale` is a divisor.
    """

    packed: UInt8[Array, "*stack n k//2"]
    block_scales: Float8e4m3fn[Array, "*stack n k//16"]
    global_scale: Float32[Array, "*stack"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded weight."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    @property
    def ndim(self) -> int:
        """Number of axes of the decoded weight."""
        return len(self.packed.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays; they may be abstract."""
        leaves = (self.packed, self.block_scales, self.global_scale)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


@jax.jit
def weight_amax(weight: Float[Weight, "*stack n k"]) -> Float32[Array, "*stack"]:
    """Return the largest magnitude of each weight; NaN or inf if there is one."""
    return _amax(_as_float32(weight), (-2, -1))


@functools.partial(jax.jit, static_argnames=("round_to",))
def global_scale_from_amax(
    amax: Float32[Array, "*stack"], *, round_to: DTypeLike = jnp.float32
) -> Float32[Array, "*stack"]:
    """Return R(R(1 / amax) * 2688); 1 where amax is zero, not finite, or too small to invert."""
    rounded = _rounding(round_to)
    reciprocal = rounded(exact.divide(jnp.ones_like(amax), amax))
    # Above 2^126 the reciprocal is subnormal and a product with it is zero on CPU.
    power = jnp.where(amax > 2.0**64, 64, 0)
    product = exact.shift_exponent(reciprocal, power) * (E2M1_MAX * E4M3_MAX)
    scale = rounded(exact.shift_exponent(product, -power))
    usable = jnp.isfinite(amax) & (amax > 0) & jnp.isfinite(scale)
    return jnp.where(usable, scale, 1.0)


def global_scale_of(
    weight: Float[Weight, "*stack n k"], *, round_to: DTypeLike = jnp.float32
) -> Float32[Array, "*stack"]:
    """Return the global scale of each weight by itself."""
    return global_scale_from_amax(weight_amax(weight), round_to=round_to)


@functools.partial(jax.jit, static_argnames=("round_to",))
def block_scales_of(
    weight: Float[Weight, "*stack n k"],
    global_scale: Float32[Array, "*stack"],
    *,
    round_to: DTypeLike = jnp.float32,
) -> Float8e4m3fn[Array, "*stack n blocks"]:
    """Return e4m3(min(R(block_amax / 6) * global_scale, 448)), with 0.125 in place of 0."""
    sixth = exact.divide(*jnp.broadcast_arrays(_amax(_blocks(weight), -1), E2M1_MAX))
    scales = _rounding(round_to)(sixth) * global_scale[..., None, None]
    # A value above 464 would become NaN.
    rounded = jnp.minimum(scales, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return jnp.where(rounded == 0, jnp.float8_e4m3fn(_ZERO_BLOCK_SCALE), rounded)


@jax.jit
def encode(
    weight: Float[Weight, "*stack n k"],
    block_scales: Float8e4m3fn[Array, "*stack n blocks"],
    global_scale: Float32[Array, "*stack"],
) -> UInt8[Array, "*stack n half_k"]:
    """Return the packed codes of a weight for given scales, none of which may be zero."""
    # The barrier keeps XLA from computing a block's scale again for each of its values.
    local = lax.optimization_barrier(local_scales(block_scales, global_scale))
    blocks = _blocks(weight)
    codes = _e2m1_codes(blocks, jnp.broadcast_to(local[..., None], blocks.shape))
    return pack_codes(codes.reshape(weight.shape))


def quantize(
    weight: Float[Weight, "*stack n k"],
    *,
    global_scale: Float32[Array, "*stack"] | None = None,
    round_to: DTypeLike = jnp.float32,
) -> NvFp4Tensor:
    """Quantize a weight, or a stack of them, to NVFP4; the equations stand above.

    Args:
        weight: finite values (`check_weight` tells); k is the input size.
        global_scale: one for each weight of the stack, to share it between layers that a
            server fuses; None computes each from its own weight.
        round_to: float32, or bfloat16 for the bytes of llm-compressor.

    Raises:
        ValueError: k is not a multiple of 16, or `global_scale` does not fit the stack.

    Source: compressed-tensors 0.20, `generate_gparam` and `calculate_qparams`.
    """
    _check_input_size(weight.shape, "quantize")
    if global_scale is None:
        global_scale = global_scale_of(weight, round_to=round_to)
    elif global_scale.shape != weight.shape[:-2]:
        raise ValueError(
            f"quantize: global_scale {global_scale.shape} does not fit weight {weight.shape}"
        )
    block_scales = block_scales_of(weight, global_scale, round_to=round_to)
    return NvFp4Tensor(encode(weight, block_scales, global_scale), block_scales, global_scale)


@functools.partial(jax.jit, static_argnames=("dtype",))
def dequantize(q: NvFp4Tensor, *, dtype: DTypeLike = jnp.bfloat16) -> Float[Array, "*stack n k"]:
    """Decode to `dtype`: the float32 value is exact, a narrower one is rounded from it."""
    return dequantize_reference(q.packed, q.block_scales, q.global_scale, dtype=dtype)


def check_weight(weight: Any, name: str) -> None:
    """Refuse, on the host, a weight that cannot be quantized; abstract values are not looked at.

    Raises:
        ValueError: NaN or infinite values, or an input size that is not a multiple of 16.
    """
    _check_input_size(weight.shape, name)
    if _is_concrete(weight) and not jnp.all(jnp.isfinite(weight_amax(weight))):
        wrong = int(jnp.sum(~jnp.isfinite(jnp.asarray(weight))))
        raise ValueError(f"{name}: {wrong} of {math.prod(weight.shape)} values are not finite")


def validate(q: NvFp4Tensor, name: str) -> None:
    """Refuse arrays that do not make an NVFP4 weight; abstract ones are only checked by shape.

    Leaves without a shape (partition specs, say) are skipped.

    Raises:
        ValueError: wrong dtypes, shapes that do not fit each other, NaN or negative block
            scales, a global scale that is not positive and finite or gives infinite weights.
    """
    leaves = {"packed": q.packed, "block_scales": q.block_scales, "global_scale": q.global_scale}
    if not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves.values()):
        return
    _check_layout(leaves, name)
    if not all(map(_is_concrete, leaves.values())):
        return
    # 0x7F is NaN; larger bytes are negative.
    codes = np.asarray(q.block_scales).view(np.uint8)
    if np.any(codes >= 0x7F):
        raise ValueError(f"{name}: block_scales hold NaN or negative values")
    scales = np.asarray(q.global_scale)
    if not np.all(np.isfinite(scales) & (scales > 0)):
        raise ValueError(f"{name}: global_scale {scales.tolist()} is not positive and finite")
    # The order of positive float8 numbers is that of their codes.
    largest = codes.max(axis=(-2, -1), initial=0).view(jnp.float8_e4m3fn).astype(np.float64)
    if np.any(E2M1_MAX * largest / scales > float(jnp.finfo(jnp.bfloat16).max)):
        raise ValueError(f"{name}: global_scale {scales.tolist()} makes weights beyond bfloat16")


def _check_layout(leaves: dict[str, Any], name: str) -> None:
    dtypes = {"packed": np.uint8, "block_scales": jnp.float8_e4m3fn, "global_scale": np.float32}
    for field, dtype in dtypes.items():
        if leaves[field].dtype != dtype:
            raise ValueError(f"{name}: {field} is {leaves[field].dtype}, not {jnp.dtype(dtype)}")
    packed, blocks, scale = (tuple(leaves[field].shape) for field in dtypes)
    fits = (
        len(packed) >= 2
        and 2 * packed[-1] % BLOCK_SIZE == 0
        and blocks == (*packed[:-1], 2 * packed[-1] // BLOCK_SIZE)
        and scale == packed[:-2]
    )
    if not fits:
        raise ValueError(
            f"{name}: packed {packed}, block_scales {blocks} and global_scale {scale} "
            f"are not [*stack, n, k/2], [*stack, n, k/{BLOCK_SIZE}] and [*stack]"
        )


def _check_input_size(shape: tuple[int, ...], name: str) -> None:
    if len(shape) < 2:
        raise ValueError(f"{name}: shape {tuple(shape)} has no output and input axes")
    if shape[-1] % BLOCK_SIZE != 0:
        raise ValueError(f"{name}: input size {shape[-1]} is not a multiple of {BLOCK_SIZE}")


def _is_concrete(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, jax.core.Tracer)


def _as_float32(weight: Float[Weight, "*shape"]) -> Float32[Array, "*shape"]:
    # The barrier keeps a rounding that the caller made (to bfloat16, in the same program): XLA
    # may drop one that is followed by a conversion back.
    return lax.optimization_barrier(jnp.asarray(weight)).astype(jnp.float32)


def _blocks(weight: Float[Weight, "*rows k"]) -> Float32[Array, "*rows blocks 16"]:
    return _as_float32(weight).reshape(*weight.shape[:-1], -1, BLOCK_SIZE)


def _rounding(round_to: DTypeLike) -> Callable[[Array], Array]:
    if jnp.dtype(round_to) == jnp.bfloat16:
        return exact.round_to_bfloat16
    if jnp.dtype(round_to) == jnp.float32:
        return lambda x: x
    raise ValueError(f"round_to: {jnp.dtype(round_to)} is neither float32 nor bfloat16")


def _amax(x: Float32[Array, "..."], axes: int | tuple[int, ...]) -> Float32[Array, "..."]:
    return exact.from_bits(jnp.max(exact.magnitude_bits(x), axis=axes))


def _e2m1_codes(
    x: Float32[Array, "*shape"], scale: Float32[Array, "*shape"]
) -> UInt8[Array, "*shape"]:
    """Codes of x / scale. Minus zero gets code 0; a negative value that rounds to zero, code 8."""
    # The standard compares the quotient after its rounding to float32, hence an exact division.
    ratio = jnp.abs(exact.divide(x, scale))
    magnitude = sum((ratio > midpoint).astype(jnp.uint8) for midpoint in _TIES_DOWN)
    magnitude += sum((ratio >= midpoint).astype(jnp.uint8) for midpoint in _TIES_UP)
    negative = (exact.float_bits(x) < 0) & (exact.magnitude_bits(x) > 0)
    return magnitude | (negative.astype(jnp.uint8) << 3)
