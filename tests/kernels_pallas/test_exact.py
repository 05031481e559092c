"""Float32 arithmetic on bits against NumPy, which follows IEEE 754, subnormal numbers included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import exact

COUNT = 20_000
EXPONENT_RANGES = {"normal": (1, 255), "subnormal": (0, 2), "any": (0, 255), "huge": (250, 255)}


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


def random_floats(seed, exponents, *, signed=True):
    low, high = exponents
    rng = np.random.default_rng(seed)
    bits = rng.integers(max(low << 23, 1), high << 23, COUNT, dtype=np.int64)
    signs = rng.integers(0, 2, COUNT) if signed else 0
    return (bits | (signs << 31)).astype(np.uint32).view(np.float32)


def same_bits(got, want):
    return np.array_equal(np.asarray(got).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("exponents", EXPONENT_RANGES.values(), ids=EXPONENT_RANGES)
def test_divide_is_correctly_rounded(device, exponents, compile_it):
    a, b = random_floats(0, exponents), random_floats(1, (0, 255))
    divide = jax.jit(exact.divide) if compile_it else exact.divide
    with np.errstate(over="ignore", under="ignore"):
        want = a / b
    assert same_bits(divide(jnp.asarray(a), jnp.asarray(b)), want)


def test_divide_keeps_the_sign_of_zero_and_overflows_to_infinity():
    a = np.array([0.0, -0.0, 0.0, 3e38, -3e38], np.float32)
    b = np.array([3.0, 3.0, -3.0, 0.5, 0.5], np.float32)
    want = np.array([0.0, -0.0, -0.0, np.inf, -np.inf], np.float32)
    assert same_bits(exact.divide(jnp.asarray(a), jnp.asarray(b)), want)


def test_divide_is_not_simplified_in_a_longer_expression(device):
    a, b, c = (random_floats(seed, (100, 150)) for seed in range(3))
    got = jax.jit(lambda a, b, c: exact.divide(a, exact.divide(b, c)))(a, b, c)
    assert same_bits(got, a / (b / c))
    assert not np.array_equal(a / (b / c), a * c / b)


@pytest.mark.parametrize("exponents", EXPONENT_RANGES.values(), ids=EXPONENT_RANGES)
def test_round_to_bfloat16(device, exponents):
    x = random_floats(2, exponents)
    want = x.astype(jnp.bfloat16).astype(np.float32)
    assert same_bits(jax.jit(exact.round_to_bfloat16)(x), want)


def test_shift_exponent(device):
    x = random_floats(3, (0, 255), signed=False)
    power = np.random.default_rng(4).integers(-80, 80, COUNT).astype(np.int32)
    with np.errstate(over="ignore", under="ignore"):
        want = np.ldexp(x, power)
    assert same_bits(jax.jit(exact.shift_exponent)(x, power), want)


def test_magnitude_bits_order_subnormals(device):
    x = np.array([0.0, -1e-45, 2e-45, -1e-38, 1.0], np.float32)
    bits = np.asarray(exact.magnitude_bits(jnp.asarray(x)))
    assert np.array_equal(np.sort(bits), bits) and bits[0] < bits[1]
