"""The plain implementation against third-party vectors and against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import (
    E2M1_VALUES,
    dequantize_reference,
    local_scales,
    nvfp4_matmul_reference,
    pack_codes,
)

GLOBAL_SCALES = np.array([1.0, 3113.7, 8.1e-36, 0.14944248, 8.5e32], np.float32)
FINITE_SCALES = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)

compiled_decode = jax.jit(dequantize_reference, static_argnames="dtype")
compiled_matmul = jax.jit(nvfp4_matmul_reference)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


def as_scales(bits):
    return jnp.asarray(np.asarray(bits, np.uint8).view(jnp.float8_e4m3fn))


def same_bits(got, want):
    return np.array_equal(np.asarray(got).view(np.uint32), want.view(np.uint32))


def every_code_with_every_scale():
    """One row a scale: the 16 codes in order, 254 rows."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (len(FINITE_SCALES), 1))
    return pack_codes(jnp.asarray(codes)), as_scales(FINITE_SCALES[:, None])


def random_weight(seed, n, k):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    bits = rng.integers(0x08, 0x7F, (n, k // 16)).astype(np.uint8)
    return jnp.asarray(packed), as_scales(bits), jnp.float32(300.0)


def decode_by_hand(packed, block_scales, global_scale):
    packed = np.asarray(packed)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    scale = np.asarray(block_scales).astype(np.float32) / np.float32(global_scale)
    return np.array(E2M1_VALUES, np.float32)[codes] * np.repeat(scale, 16, axis=1)


@pytest.mark.parametrize("decode", [dequantize_reference, compiled_decode], ids=["eager", "jit"])
@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_every_code_with_every_scale(device, golden, global_scale, decode):
    packed, scales = every_code_with_every_scale()
    got = decode(packed, scales, jnp.asarray(global_scale), dtype=jnp.float32)
    tables = np.load(golden / "dtype_tables.npz")
    local = tables["e4m3fn_decode_f32"][FINITE_SCALES, None] / global_scale
    assert same_bits(got, tables["e2m1_decode_f32"][None, :] * local)


def test_local_scales_of_every_byte(device, golden):
    bits = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(len(GLOBAL_SCALES), 0)
    got = np.asarray(jax.jit(local_scales)(as_scales(bits), jnp.asarray(GLOBAL_SCALES)))
    table = np.load(golden / "dtype_tables.npz")["e4m3fn_decode_f32"]
    want = table[bits] / GLOBAL_SCALES[:, None, None]
    finite = np.isfinite(want)
    assert same_bits(got[finite], want[finite])
    assert np.isnan(got[~finite]).all() and (~finite).sum() == 2 * len(GLOBAL_SCALES)


def test_narrow_types_are_rounded_from_float32():
    packed, scales = every_code_with_every_scale()
    wide = np.asarray(compiled_decode(packed, scales, jnp.float32(3113.7), dtype=jnp.float32))
    got = compiled_decode(packed, scales, jnp.float32(3113.7))
    assert got.dtype == jnp.bfloat16
    assert np.array_equal(
        np.asarray(got).view(np.uint16), wide.astype(jnp.bfloat16).view(np.uint16)
    )


def test_a_stack_is_its_parts():
    parts = [random_weight(seed, 6, 32) for seed in range(3)]
    parts = [(p, s, g * (1 + i)) for i, (p, s, g) in enumerate(parts)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    got = compiled_decode(*stack, dtype=jnp.float32)
    for i, part in enumerate(parts):
        assert same_bits(got[i], decode_by_hand(*part))


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)], ids=["vector", "matrix", "batch"])
def test_matmul_in_float32(device, batch):
    weight = random_weight(0, 24, 64)
    x = np.random.default_rng(1).standard_normal((*batch, 64)).astype(np.float32)
    got = compiled_matmul(jnp.asarray(x), *weight)
    want = x.astype(np.float64) @ decode_by_hand(*weight).astype(np.float64).T
    assert got.shape == (*batch, 24) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


def test_matmul_in_bfloat16_sums_in_float32(device):
    """256 + 1 - 256 is 0 where partial sums are bfloat16, and 1 where they are float32."""
    ones = pack_codes(jnp.full((1, 48), 2, jnp.uint8))
    scales = jnp.ones((1, 3), jnp.float8_e4m3fn)
    x = (
        jnp.zeros((1, 48), jnp.bfloat16)
        .at[0, jnp.array([0, 16, 32])]
        .set(jnp.array([256.0, 1.0, -256.0], jnp.bfloat16))
    )
    got = compiled_matmul(x, ones, scales, jnp.float32(1.0))
    assert got.dtype == jnp.bfloat16 and got.tolist() == [[1.0]]


def test_matmul_differentiates_with_respect_to_x():
    weight = random_weight(2, 8, 32)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((4, 32)), jnp.float32)
    cotangent = jnp.asarray(np.random.default_rng(4).standard_normal((4, 8)), jnp.float32)
    _, pull = jax.vjp(lambda x: compiled_matmul(x, *weight), x)
    want = np.asarray(cotangent) @ decode_by_hand(*weight)
    np.testing.assert_allclose(pull(cotangent)[0], want, rtol=1e-5, atol=1e-5)
