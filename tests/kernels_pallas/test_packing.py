"""The kernels' layout against a reader of single lanes, and back to the byte contract."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas import E2M1_VALUES, unpack_codes
from kernels_pallas.packing import (
    CODE_MASK,
    MERGE,
    OUT_EXPONENT,
    RECORD_WORDS,
    ROTATE_FIRST,
    ROTATE_MERGED,
    ROTATE_SECOND,
    SCALE_BITS,
    pack_records,
    scale_bytes,
    unpack_records,
)


def random_weight(*shape, seed=0):
    """Every code, every positive finite scale."""
    *stack, n, k = shape
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (*stack, n, k // 2), dtype=np.uint8)
    codes = rng.integers(1, 127, (*stack, n, k // 16), dtype=np.uint8)
    return jnp.asarray(packed), jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn))


def lane_values(record, lane):
    """Decode one lane as a kernel does, with bfloat16 products: {(row, column): value}."""
    group, block = divmod(lane, 4)
    words = [int(w) & 0xFFFFFFFF for w in record]
    rows = np.array(words, np.uint32).view(np.uint8)[512 + 2 * lane : 514 + 2 * lane]
    scales = ((rows.astype(np.uint16) << 4) | SCALE_BITS).view(ml_dtypes.bfloat16)
    values = {}
    for pair in range(2):
        first, second = words[4 * lane + 2 * pair : 4 * lane + 2 * pair + 2]
        merged = (first & int(MERGE)) | (second & ~int(MERGE) & 0xFFFFFFFF)
        halves = (
            (first, ROTATE_FIRST, ROTATE_MERGED[0]),
            (second, ROTATE_SECOND, ROTATE_MERGED[1]),
        )
        for i, (word, rotations, last) in enumerate(halves, start=2 * pair):
            turned = [(word, r) for r in rotations] + [(merged, last)]
            for register, (source, r) in enumerate(turned):
                bits = ((source << r | source >> (32 - r)) & int(CODE_MASK)) & 0xFFFFFFFF
                half_of_block, half_of_rows = divmod(register, 2)
                for v in range(2):
                    code = np.array([(bits >> 16 * v) & 0xFFFF], np.uint16)
                    # In float64: numpy's bfloat16 product would be computed in float32, too.
                    value = code.view(ml_dtypes.bfloat16).astype(np.float64)[0]
                    scale = float(scales[half_of_rows])
                    column = 16 * block + 8 * half_of_block + 2 * i + v
                    values[group + 8 * half_of_rows, column] = value * scale * 2.0**OUT_EXPONENT
    return values


def test_lanes_own_what_the_layout_says():
    packed, scales = random_weight(32, 128)
    words = np.asarray(pack_records(packed, scales))
    codes = np.asarray(unpack_codes(packed))
    block_scales = np.repeat(np.asarray(scales).astype(np.float64), 16, axis=1)
    want = np.array(E2M1_VALUES)[codes] * block_scales
    got = np.full_like(want, np.nan)
    for s, t in np.ndindex(2, 2):
        for lane in range(32):
            for (row, column), value in lane_values(words[s, t], lane).items():
                got[16 * s + row, 64 * t + column] = value
    assert np.array_equal(got, want)


@pytest.mark.parametrize("shape", [(16, 64), (3, 40, 80), (2, 2, 33, 16), (1, 48), (64, 4096)])
def test_the_way_back_gives_the_same_bytes(shape):
    packed, scales = random_weight(*shape)
    *stack, n, k = shape
    words = jax.jit(pack_records)(packed, scales)
    assert words.shape == (*stack, -(-n // 16), -(-k // 64), RECORD_WORDS)
    packed_again, scales_again = unpack_records(words, n=n, k=k)
    assert np.array_equal(packed_again, packed)
    assert np.array_equal(
        np.asarray(scales_again).view(np.uint8), np.asarray(scales).view(np.uint8)
    )


def test_every_scale_and_code_decodes_exactly():
    """126 positive scales times 16 codes, as a bfloat16 product."""
    scales = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    bits = (scale_bytes()[1:].astype(np.uint16) << 4) | SCALE_BITS
    factors = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    codes = np.arange(16, dtype=np.uint16)
    patterns = (((codes & 8) << 12) | ((codes & 7) << 6)).view(ml_dtypes.bfloat16)
    products = factors[:, None] * patterns.astype(np.float64)
    rounded = products.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    want = scales[:, None] * np.array(E2M1_VALUES)
    assert np.array_equal(rounded * 2.0**OUT_EXPONENT, want)
    assert len(set(scale_bytes().tolist())) == 127 and scale_bytes().max() < 248  # finite


def test_a_zero_scale_gives_signed_zeros():
    packed, scales = random_weight(16, 64)
    scales = scales.at[3, 1].set(0)
    packed_again, scales_again = unpack_records(pack_records(packed, scales), n=16, k=64)
    assert float(scales_again[3, 1]) == 0
    block = np.asarray(packed)[3, 8:16]
    assert np.array_equal(np.asarray(packed_again)[3, 8:16], block & 0x88)
    other = np.delete(np.asarray(packed_again)[3], slice(8, 16))
    assert np.array_equal(other, np.delete(np.asarray(packed)[3], slice(8, 16)))


def test_padding_has_code_zero():
    packed, scales = random_weight(1, 16)
    whole, _ = unpack_records(pack_records(packed, scales), n=16, k=64)
    kept = np.zeros((16, 32), bool)
    kept[0, :8] = True
    assert not np.asarray(whole)[~kept].any()
