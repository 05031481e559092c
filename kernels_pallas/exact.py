"""Float32 operations whose last bit is the same on every backend, eager or compiled.

XLA does not promise that. On GPUs it divides with an error of up to 2 ulp; on CPUs it flushes
subnormal numbers to zero; it may rewrite a / (b / c) as a * c / b, and drop a rounding to
bfloat16 between two float32 operations. Integer operations have none of these freedoms, so the
functions here work on the bits. NaN is not handled.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

_SIGN = -(2**31)
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_MAX_CORRECTIONS = 3  # of a quotient that is at most 2 ulp wrong and then truncated


def float_bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Return the bits of a float32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def magnitude_bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Return the bits of |x|, which order as the numbers do, subnormal ones included."""
    return float_bits(x) & _MAGNITUDE


def from_bits(bits: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Return the float32 with these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def divide(a: Float32[Array, "*shape"], b: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Divide finite numbers, rounded to nearest even as IEEE 754 says; `b` must not be zero.

    The quotient of the mantissas is guessed in float32. Its remainder, exact modulo 2^32, tells
    how many units the guess is wrong.
    """
    dividend, exponent_a = _split(a)
    divisor, exponent_b = _split(b)
    short = (dividend < divisor).astype(jnp.int32)
    dividend = dividend << short
    guess = dividend.astype(jnp.float32) / divisor.astype(jnp.float32)
    quotient = (guess * 2.0**23).astype(jnp.int32)
    remainder = (dividend << 23) - quotient * divisor
    for _ in range(_MAX_CORRECTIONS):
        up = (2 * remainder > divisor).astype(jnp.int32)
        down = (2 * remainder < -divisor).astype(jnp.int32)
        quotient, remainder = quotient + up - down, remainder - (up - down) * divisor
    magnitude = _join(quotient, remainder, exponent_a - exponent_b - short)
    sign = (float_bits(a) ^ float_bits(b)) & _SIGN
    return from_bits(jnp.where(dividend == 0, 0, magnitude) | sign)


def shift_exponent(
    x: Float32[Array, "*shape"], power: Int32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Multiply by 2^power, for x >= 0; subnormal inputs and results are right."""
    mantissa, exponent = _split(x)
    shifted = _join(mantissa, jnp.zeros_like(mantissa), exponent + power)
    return from_bits(jnp.where(mantissa == 0, 0, shifted))


def round_to_bfloat16(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Round to the nearest bfloat16, ties to even, and stay float32."""
    bits = float_bits(x)
    return from_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000)


def _split(x: Float32[Array, "*shape"]) -> tuple[Int32[Array, "*shape"], Int32[Array, "*shape"]]:
    """Return (m, e): |x| = m 2^(e - 23) with 2^23 <= m < 2^24, or m = 0."""
    bits = magnitude_bits(x)
    fraction, field = bits & 0x7FFFFF, bits >> 23
    shift = lax.clz(fraction) - 8
    mantissa = jnp.where(field > 0, fraction | (1 << 23), fraction << shift)
    return mantissa, jnp.where(field > 0, field - 127, -126 - shift)


def _join(
    mantissa: Int32[Array, "*shape"],
    remainder: Int32[Array, "*shape"],
    exponent: Int32[Array, "*shape"],
) -> Int32[Array, "*shape"]:
    """Return the bits of (m + r) 2^(e - 23), 2^23 <= m <= 2^24; only the sign of r, |r| < 1/2,
    matters: it decides what looks like a tie when a subnormal result loses bits."""
    lost = jnp.clip(-126 - exponent, 0, 25)
    kept, low, half = mantissa >> lost, mantissa & ((1 << lost) - 1), (1 << lost) >> 1
    tie_up = (remainder > 0) | ((remainder == 0) & (kept & 1 == 1))
    subnormal = kept + ((low > half) | ((low == half) & tie_up))
    normal = jnp.minimum(((exponent + 126) << 23) + mantissa, _INFINITY)
    normal = jnp.where(exponent > 127, _INFINITY, normal)
    return jnp.where(lost > 0, subnormal, normal)
