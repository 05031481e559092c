"""The layout in which GPU kernels are to read an NVFP4 weight, in 4.5 bits a value.

    words  int32 [*stack, ceil(n/16), ceil(k/64), 144]

A record of 144 words holds 16 rows and 64 columns and belongs to one warp. Lane 4g + b (g < 8,
b < 4) owns words 4 lane + i (i < 4): rows g and g + 8, columns 16b + {2i, 2i+1, 2i+8, 2i+9}. Each
word is one A fragment of the tensor core's m16n8k16 product, if the other operand orders its
columns alike. All columns of a lane lie in one block, so two scale bytes (row g, row g + 8), at
byte 512 + 2 lane, serve its 32 codes. Rows and columns beyond n and k have code 0.

As bfloat16 bits, a code is sign << 15 | rest << 6, which is value 2^-126, and a scale byte is
byte << 4 | SCALE_BITS, which is scale 2^106: one product of the two decodes a weight, exactly,
times 2^-OUT_EXPONENT.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float8e4m3fn, Int32, UInt8, UInt32

from kernels_pallas.format import BLOCK_SIZE

RECORD_ROWS = 16
RECORD_COLUMNS = 64
RECORD_WORDS = 144
SCALE_BITS = 0x7000
OUT_EXPONENT = 20

# Bits are permuted within pairs of words: each register (two codes) is a rotation of a word of
# the pair, or of MERGE ? first : second, and one AND with CODE_MASK.
CODE_MASK = np.uint32(0x81C081C0)
ROTATE_FIRST, ROTATE_SECOND, ROTATE_MERGED = (0, 4, 10), (2, 6, 12), (8, 14)
_PAIR = ((ROTATE_FIRST, ROTATE_MERGED[0]), (ROTATE_SECOND, ROTATE_MERGED[1]))

_CODE_WORDS = 128
_BLOCKS = RECORD_COLUMNS // BLOCK_SIZE
# (floor(log2 scale) + 9) << 3 | mantissa, of the e4m3 codes below 8; code + 16 of the others.
# A scale of zero has no exponent; its byte is one that no other scale has.
_SMALL_SCALE_BYTES = (144, 0, 8, 12, 16, 18, 20, 22)


def _reached(rotations: tuple[int, ...]) -> int:
    """Bits of a word that these rotations put under the mask."""
    bits = [bit for bit in range(32) if int(CODE_MASK) >> bit & 1]
    return sum(1 << (bit - rotation) % 32 for rotation in rotations for bit in bits)


MERGE = np.uint32(0xFFFFFFFF ^ _reached(ROTATE_FIRST))


def scale_bytes() -> np.ndarray:
    """Return the scale byte of each e4m3 code that is not negative and not NaN, uint8 [127]."""
    return np.array([*_SMALL_SCALE_BYTES, *range(8 + 16, 127 + 16)], np.uint8)


def pack_records(
    packed: UInt8[Array, "*stack n half_k"], block_scales: Float8e4m3fn[Array, "*stack n blocks"]
) -> Int32[Array, "*stack slices records 144"]:
    """Lay a weight out for the kernels; k must be a multiple of 16.

    Exact: `unpack_records` gives the same bytes, but for blocks whose scale is zero, which become
    zeros that keep their signs.
    """
    *stack, n, half_k = packed.shape
    slices, records = -(-n // RECORD_ROWS), -(-2 * half_k // RECORD_COLUMNS)
    scales = lax.bitcast_convert_type(block_scales, jnp.uint8)
    missing = records * RECORD_COLUMNS - 2 * half_k
    edges = [(0, 0)] * len(stack) + [(0, slices * RECORD_ROWS - n)]
    codes = jnp.pad(packed, [*edges, (0, missing // 2)])
    scales = jnp.pad(scales, [*edges, (0, missing // BLOCK_SIZE)])
    # Axes: slice, half of the rows, row, record, block, half of the block, byte.
    codes = codes.reshape(-1, slices, 2, 8, records, _BLOCKS, 2, 4)
    scales = scales.reshape(-1, slices, 2, 8, records, _BLOCKS)
    codes = jnp.where(scales[..., None, None] == 0, codes & 0x88, codes)
    words = jnp.concatenate([_code_words(codes), _scale_words(scales)], axis=-1)
    words = lax.bitcast_convert_type(words, jnp.int32)
    return words.reshape(*stack, slices, records, RECORD_WORDS)


def unpack_records(
    words: Int32[Array, "*stack slices records 144"], *, n: int, k: int
) -> tuple[UInt8[Array, "*stack n half_k"], Float8e4m3fn[Array, "*stack n blocks"]]:
    """Return `packed` and `block_scales` of a weight [n, k]; inverse of `pack_records`."""
    *stack, slices, records, _ = words.shape
    unsigned = lax.bitcast_convert_type(words, jnp.uint32).reshape(
        -1, slices, records, RECORD_WORDS
    )
    rows, columns = slices * RECORD_ROWS, records * RECORD_COLUMNS
    packed = _codes_of_words(unsigned[..., :_CODE_WORDS]).reshape(*stack, rows, columns // 2)
    scales = _scales_of_words(unsigned[..., _CODE_WORDS:])
    scales = scales.reshape(*stack, rows, columns // BLOCK_SIZE)[..., :n, : k // BLOCK_SIZE]
    return packed[..., :n, : k // 2], lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)


def _rotate(x: UInt32[Array, "..."], left: int) -> UInt32[Array, "..."]:
    left %= 32
    return (x << left) | (x >> (32 - left)) if left else x


def _code_words(
    codes: UInt8[Array, "stack slices 2 8 records 4 2 4"],
) -> UInt32[Array, "stack slices records 128"]:
    # To slice, record, row, block, byte (word of the lane), half of the block, half of the rows.
    wide = codes.transpose(0, 1, 4, 3, 5, 7, 6, 2).astype(jnp.uint32)
    low, high = (((c & 8) << 12) | ((c & 7) << 6) for c in (wide & 15, wide >> 4))
    registers = (low | (high << 16)).reshape(*wide.shape[:3], 32, 2, 2, 4)
    words = [
        sum(_rotate(registers[..., w, j], -left) for j, left in enumerate(rotations))
        for w, (rotations, _) in enumerate(_PAIR)
    ]
    merged = sum(_rotate(registers[..., w, 3], -left) for w, (_, left) in enumerate(_PAIR))
    pair = [word | (merged & mask) for word, mask in zip(words, (MERGE, ~MERGE), strict=True)]
    return jnp.stack(pair, axis=-1).reshape(*wide.shape[:3], _CODE_WORDS)


def _codes_of_words(
    words: UInt32[Array, "stack slices records 128"],
) -> UInt8[Array, "stack slices 2 8 records 4 2 4"]:
    pairs = words.reshape(*words.shape[:3], 32, 2, 2)
    merged = (pairs[..., 0] & MERGE) | (pairs[..., 1] & ~MERGE)
    turned = [
        [*(_rotate(pairs[..., w], left) for left in rotations), _rotate(merged, last)]
        for w, (rotations, last) in enumerate(_PAIR)
    ]
    registers = jnp.stack([jnp.stack(word, axis=-1) for word in turned], axis=-2) & CODE_MASK
    low, high = (((h >> 12) & 8) | ((h >> 6) & 7) for h in (registers & 0xFFFF, registers >> 16))
    codes = (low | (high << 4)).astype(jnp.uint8)
    codes = codes.reshape(*words.shape[:3], 8, _BLOCKS, 4, 2, 2)
    return codes.transpose(0, 1, 7, 3, 2, 4, 6, 5)


def _scale_words(
    scales: UInt8[Array, "stack slices 2 8 records 4"],
) -> UInt32[Array, "stack slices records 16"]:
    encoded = jnp.take(scale_bytes(), scales.astype(jnp.int32), axis=0, mode="clip")
    lanes = encoded.transpose(0, 1, 4, 3, 5, 2)
    return lax.bitcast_convert_type(lanes.reshape(*lanes.shape[:3], 16, 4), jnp.uint32)


def _scales_of_words(
    words: UInt32[Array, "stack slices records 16"],
) -> UInt8[Array, "stack slices 2 8 records 4"]:
    encoded = lax.bitcast_convert_type(words, jnp.uint8).astype(jnp.int32)
    codes = np.zeros(256, np.uint8)
    codes[scale_bytes()] = np.arange(127)
    lanes = jnp.take(codes, encoded, axis=0).reshape(*words.shape[:3], 8, _BLOCKS, 2)
    return lanes.transpose(0, 1, 5, 3, 2, 4)
