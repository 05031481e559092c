"""The byte contract of an NVFP4 weight [n, k] (n output features, k input features).

    packed        uint8 [n, k/2]    two e2m1 codes a byte; the even column is the low nibble
    block_scales  e4m3fn [n, k/16]  one for 16 neighbouring columns of a row, not negative
    global_scale  float32 []        a divisor, about 2688 / max|weight|

    value = E2M1_VALUES[code] * (block_scale / global_scale)

A code is a sign (bit 3), two exponent bits and one mantissa bit. This is the layout of
compressed-tensors ("nvfp4-pack-quantized"). All three may have the same leading axes.
"""

import jax.numpy as jnp
from jaxtyping import Array, UInt8

BLOCK_SIZE = 16  # columns that share a block scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES: tuple[float, ...] = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)


def pack_codes(codes: UInt8[Array, "*stack n k"]) -> UInt8[Array, "*stack n half_k"]:
    """Put two codes (0..15) in each byte, the even column in the low nibble; k must be even."""
    # Two strided slices would make XLA on CPU compute each code many times over.
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return jnp.sum(pairs << _nibble_shifts(pairs.ndim), axis=-1, dtype=jnp.uint8)


def unpack_codes(packed: UInt8[Array, "*stack n half_k"]) -> UInt8[Array, "*stack n k"]:
    """Take the codes (0..15) out of the bytes; inverse of `pack_codes`."""
    # Interleaving two halves would not be vectorized on CPU.
    pairs = (packed[..., None] >> _nibble_shifts(packed.ndim + 1)) & 15
    return pairs.reshape(*packed.shape[:-1], -1)


def _nibble_shifts(ndim: int) -> UInt8[Array, "*ones 2"]:
    return jnp.array([0, 4], jnp.uint8).reshape((1,) * (ndim - 1) + (2,))
