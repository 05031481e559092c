"""The byte contract, read by decoders written apart from it."""

import jax.numpy as jnp
import numpy as np

from kernels_pallas import BLOCK_SIZE, E2M1_MAX, E2M1_VALUES, E4M3_MAX, pack_codes, unpack_codes


def test_even_column_is_the_low_nibble():
    """Codes 1 and 2 make the byte 0x21 (conventions: Q6)."""
    codes = jnp.array([[1, 2, 15, 0]], jnp.uint8)
    packed = np.asarray(pack_codes(codes))
    assert packed.tolist() == [[0x21, 0x0F]]
    by_hand = [int(byte) >> shift & 15 for byte in packed[0] for shift in (0, 4)]
    assert by_hand == codes[0].tolist()


def test_every_byte_survives():
    packed = jnp.arange(256, dtype=jnp.uint8).reshape(2, 8, 16)
    codes = unpack_codes(packed)
    assert codes.shape == (2, 8, 32) and codes.dtype == jnp.uint8
    assert np.array_equal(codes[..., 0::2], packed & 15)
    assert np.array_equal(codes[..., 1::2], packed >> 4)
    assert np.array_equal(pack_codes(codes), packed)


def test_code_table_is_that_of_e2m1(golden):
    table = np.load(golden / "dtype_tables.npz")["e2m1_decode_f32"]
    ours = np.array(E2M1_VALUES, np.float32)
    assert np.array_equal(ours.view(np.uint32), table.view(np.uint32))


def test_limits_are_those_of_the_types(golden):
    e4m3 = np.load(golden / "dtype_tables.npz")["e4m3fn_decode_f32"]
    assert (BLOCK_SIZE, E2M1_MAX, E4M3_MAX) == (16, max(E2M1_VALUES), np.nanmax(e4m3))
