"""The quantizer against compressed-tensors, bit for bit, and by its properties."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kernels_pallas import E2M1_VALUES, E4M3_MAX, local_scales, unpack_codes
from qerl_jax.quant import (
    NvFp4Tensor,
    check_weight,
    dequantize,
    encode,
    global_scale_from_amax,
    global_scale_of,
    quantize,
    validate,
    weight_amax,
)

VECTORS = "nvfp4_compressed_tensors.npz"
FINITE_CASES = (
    *("all_zero_2x32", "constant_2x32", "f32_max_2x16", "f32_subnormal_2x16", "heavy_tail_6x96"),
    *("huge_2x32", "mixed_magnitude_4x32", "neg_zero_2x16", "normal_bf16_16x128"),
    *("normal_f32_8x64", "row_1x16", "scale_ties_and_subnormals_16x16", "spike_3x48"),
    *("tall_33x16", "ties_exact_3x16", "ties_mixed_scales_4x16", "tiny_2x32", "zero_blocks_4x64"),
)
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


def load_case(golden, case, variant):
    """The input in its own dtype, and the fields that compressed-tensors made of it."""
    with np.load(golden / VECTORS) as vectors:
        prefix = f"{case}.{variant}/"
        fields = {k.removeprefix(prefix): vectors[k] for k in vectors.files if k.startswith(prefix)}
    if variant == "bf16":
        return fields["input_bf16bits"].view(jnp.bfloat16), fields
    return fields["input"], fields


def padded(weight, fields):
    """Add zero blocks up to one shape, so that all cases run in one compiled program."""

    def extend(name, size, fill=0):
        whole = np.full((33, size), fill, fields[name].dtype)
        whole[tuple(map(slice, fields[name].shape))] = fields[name]
        return {name: whole}

    pad = [(0, 33 - weight.shape[0]), (0, 128 - weight.shape[1])]
    return jnp.asarray(np.pad(weight, pad)), {
        **fields,
        **extend("weight_scale_bits", 8, fill=0x20),
        **extend("weight_packed", 64),
        **extend("dequant_f32", 128),
        **extend("dequant_bf16bits", 128),
    }


def bits(array, dtype):
    return np.asarray(array).view(dtype)


def assert_same_bytes(q, fields, *, stack=()):
    def compare(name, got, want):
        got = np.asarray(got)
        want = np.broadcast_to(want, (*stack, *want.shape)).reshape(got.shape)
        assert np.array_equal(got, want), f"{name}: {(got != want).sum()} of {got.size} differ"

    want_scale = fields["weight_global_scale"].view(np.uint32)
    compare("global_scale", bits(q.global_scale, np.uint32), want_scale)
    compare("block_scales", bits(q.block_scales, np.uint8), fields["weight_scale_bits"])
    compare("packed", q.packed, fields["weight_packed"])
    decoded = bits(dequantize(q, dtype=jnp.float32), np.uint32)
    compare("float32 values", decoded, fields["dequant_f32"].view(np.uint32))
    compare("bfloat16 values", bits(dequantize(q), np.uint16), fields["dequant_bf16bits"])


def relative_error(q, weight):
    return float(np.linalg.norm(dequantize(q, dtype=jnp.float32) - weight) / np.linalg.norm(weight))


def normal(seed, shape, std=1.0):
    return (std * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


# Golden vectors


def test_case_list_is_complete(golden):
    with np.load(golden / VECTORS) as vectors:
        cases = {name.split(".")[0] for name in vectors.files}
    assert cases == {*FINITE_CASES, "nan_2x32", "inf_2x32"}


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("case", FINITE_CASES)
def test_bytes_of_compressed_tensors(device, golden, case, variant):
    weight, fields = padded(*load_case(golden, case, variant))
    assert_same_bytes(quantize(weight, round_to=DTYPES[variant]), fields)


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("case", ["normal_f32_8x64", "f32_max_2x16", "zero_blocks_4x64"])
def test_bytes_without_compilation(device, golden, case, variant):
    weight, fields = padded(*load_case(golden, case, variant))
    with jax.disable_jit():
        assert_same_bytes(quantize(weight, round_to=DTYPES[variant]), fields)


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("case", ["heavy_tail_6x96", "tiny_2x32"])
def test_bytes_of_a_stack_in_one_program(device, golden, case, variant):
    """Quantize and decode where XLA may fuse and simplify it all."""
    weight, fields = load_case(golden, case, variant)

    @jax.jit
    def program(stack):
        q = quantize(stack, round_to=DTYPES[variant])
        return q, dequantize(q, dtype=jnp.float32)

    q, values = program(jnp.broadcast_to(weight, (2, 3, *weight.shape)))
    assert_same_bytes(q, fields, stack=(2, 3))
    want = np.broadcast_to(fields["dequant_f32"], values.shape)
    assert np.array_equal(bits(values, np.uint32), want.view(np.uint32))


def test_a_rounding_before_the_quantizer_is_not_dropped(device):
    """XLA may drop a rounding to bfloat16 if it sees the conversion back to float32."""
    weight = normal(11, (8, 64))
    got = jax.jit(lambda weight: quantize(weight.astype(jnp.bfloat16)))(weight)
    want = quantize(weight.astype(jnp.bfloat16))
    assert got.global_scale == want.global_scale
    assert np.array_equal(got.block_scales, want.block_scales)
    assert np.array_equal(got.packed, want.packed)


@pytest.mark.parametrize("case", ["nan_2x32", "inf_2x32"])
def test_not_finite_input_leaves_usable_scales(golden, case):
    q = quantize(load_case(golden, case, "f32")[0])
    assert q.global_scale == 1.0
    validate(q, case)


def test_block_scales_round_as_torch(device, golden):
    """Values, midpoints and their neighbours of e4m3, saturating as torch does."""
    tables = np.load(golden / "dtype_tables.npz")
    value, want = tables["f32_to_e4m3fn/input"], tables["f32_to_e4m3fn/torch213_saturating_bits"]
    with np.errstate(over="ignore"):
        exact_sixth = np.isfinite(6 * value) & ((6 * value) / np.float32(6) == value) & (value > 0)
    assert exact_sixth.sum() > 300
    weight = np.zeros((exact_sixth.sum(), 16), np.float32)
    weight[:, 3] = -6 * value[exact_sixth]
    got = quantize(weight, global_scale=jnp.float32(1.0)).block_scales
    want = np.where(want == 0, 0x20, want)[exact_sixth]
    assert np.array_equal(bits(got, np.uint8)[:, 0], want)


def test_codes_round_as_compressed_tensors(device, golden):
    """Midpoints of e2m1 and their neighbours; -0.0 is code 0, a small negative code 8."""
    tables = np.load(golden / "dtype_tables.npz")
    x, want = tables["f32_to_e2m1/input"], tables["f32_to_e2m1/compressed_tensors_value"]
    weight = np.full((len(x), 16), 6.0, np.float32)
    weight[:, 1] = x
    q = quantize(weight, global_scale=jnp.float32(E4M3_MAX))  # a block scale of 448 / 448
    codes = np.asarray(unpack_codes(q.packed))[:, 1]
    got = np.array(E2M1_VALUES, np.float32)[codes]
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


# Known faults of the field, by their numbers in the conventions


def test_q1_decoded_weight_is_close_to_its_input():
    weight = normal(0, (64, 128))
    assert relative_error(quantize(weight), weight) < 0.1


@pytest.mark.parametrize("std", [1.0, 0.02, 0.01, 0.005, 0.002, 0.001])
def test_q2_error_does_not_depend_on_the_magnitude(std):
    weight = normal(1, (256, 256), std)
    assert relative_error(quantize(weight), weight) == pytest.approx(0.095, abs=0.001)


def test_q3_zero_block_zero_tensor_and_saturated_scale():
    weight = normal(2, (2, 4, 32))
    weight[0], weight[1, 1, :16] = 0, 0
    q = quantize(weight)
    validate(q, "weight")
    values = np.asarray(dequantize(q, dtype=jnp.float32))
    assert q.global_scale[0] == 1.0 and not values[0].any() and not values[1, 1, :16].any()
    saturated = quantize(weight[1], global_scale=jnp.float32(1e6))
    assert bits(saturated.block_scales, np.uint8).max() == 0x7E
    assert np.isfinite(dequantize(saturated)).all()


def test_q6_an_independent_decoder_reads_the_bytes():
    weight = normal(3, (3, 32))
    q = quantize(weight)
    packed, scales = np.asarray(q.packed), np.asarray(q.block_scales).astype(np.float32)
    for row, column in np.ndindex(3, 32):
        code = packed[row, column // 2] >> 4 * (column % 2) & 15
        local = scales[row, column // 16] / np.asarray(q.global_scale)
        want = np.float32(E2M1_VALUES[code]) * local
        assert dequantize(q, dtype=jnp.float32)[row, column] == want


# Properties

weights = hnp.arrays(
    np.float32,
    (3, 32),
    elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
    | st.floats(-1.0, 1.0, width=32, allow_subnormal=False),
)
few = settings(max_examples=60)


@few
@given(weights)
def test_error_is_within_half_a_local_step(weight):
    q = quantize(weight)
    local = np.repeat(np.asarray(jax.jit(local_scales)(q.block_scales, q.global_scale)), 16, axis=1)
    inside = np.minimum(np.abs(weight), 6 * local)  # beyond, the code saturates
    half_step = np.select([inside <= 2 * local, inside <= 4 * local], [0.25, 0.5], 1.0) * local
    error = np.abs(np.abs(np.asarray(dequantize(q, dtype=jnp.float32))) - inside)
    assert np.all(error <= half_step * (1 + 1e-6))
    # Half a step of e4m3: 1/16 of the scale, or 2^-10 of a subnormal one.
    rounding = np.maximum(local / 16, 2.0**-10 / np.asarray(q.global_scale))
    assert np.all(np.abs(weight) <= 6 * (local + rounding) * (1 + 1e-6))


@few
@given(weights)
def test_encoding_decoded_values_with_their_scales_gives_the_same_codes(weight):
    q = quantize(weight)
    again = encode(dequantize(q, dtype=jnp.float32), q.block_scales, q.global_scale)
    codes = np.asarray(unpack_codes(q.packed))
    codes = np.where(codes == 8, 0, codes)  # minus zero is encoded as zero
    assert np.array_equal(unpack_codes(again), codes)


@few
@given(weights)
def test_signs_are_symmetric(weight):
    plus, minus = quantize(weight), quantize(-weight)
    assert plus.global_scale == minus.global_scale
    assert np.array_equal(plus.block_scales, minus.block_scales)
    codes, mirrored = unpack_codes(plus.packed), unpack_codes(minus.packed)
    assert np.array_equal(mirrored, np.where(weight == 0, 0, codes ^ 8))


@few
@given(weights, st.integers(-20, 20))
def test_a_power_of_two_moves_only_the_global_scale(weight, power):
    weight[0, 0] = 100.0
    q, scaled = quantize(weight), quantize(np.ldexp(weight, power))
    assert scaled.global_scale == np.ldexp(np.asarray(q.global_scale), -power)
    assert np.array_equal(q.block_scales, scaled.block_scales)
    assert np.array_equal(q.packed, scaled.packed)


# Scales and the container


def test_shared_global_scale_is_used():
    weight = normal(4, (2, 8, 32))
    scale = global_scale_from_amax(jnp.max(weight_amax(weight))[None])
    q = quantize(weight, global_scale=jnp.broadcast_to(scale, (2,)))
    assert np.array_equal(q.global_scale, np.repeat(np.asarray(scale), 2))
    assert np.array_equal(scale, [np.min(global_scale_of(weight))])
    for layer in range(2):
        alone = quantize(weight[layer], global_scale=scale[0])
        assert np.array_equal(q.packed[layer], alone.packed)
        assert relative_error(alone, weight[layer]) < 0.1


def test_bfloat16_rounding_gives_other_bytes_and_the_same_quality():
    weight = normal(5, (64, 64)).astype(jnp.bfloat16)
    wide, narrow = quantize(weight), quantize(weight, round_to=jnp.bfloat16)
    assert wide.global_scale != narrow.global_scale
    assert narrow.global_scale == jnp.float32(narrow.global_scale.astype(jnp.bfloat16))
    for q in (wide, narrow):
        assert relative_error(q, weight.astype(np.float32)) < 0.1


def test_container_reports_the_decoded_weight():
    q = quantize(normal(6, (5, 8, 32)))
    assert (q.shape, q.ndim) == ((5, 8, 32), 3)
    assert q.nbytes == 5 * 8 * 32 // 2 + 5 * 8 * 2 + 5 * 4
    assert q.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(q))


def test_container_is_a_tree():
    layers = [quantize(normal(seed, (8, 32))) for seed in range(3)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    assert isinstance(stack, NvFp4Tensor) and stack.shape == (3, 8, 32)
    _, scanned = jax.lax.scan(lambda carry, q: (carry, dequantize(q)), None, stack)
    assert np.array_equal(scanned, dequantize(stack))
    shapes = jax.tree.map(jnp.shape, stack)
    assert shapes.packed == (3, 8, 16)
    replaced = stack.replace(global_scale=2 * stack.global_scale)
    assert np.array_equal(2 * dequantize(replaced), dequantize(stack))


def test_abstract_evaluation_matches_the_real_one():
    weight = normal(7, (2, 8, 32))
    abstract = jax.eval_shape(quantize, jax.ShapeDtypeStruct(weight.shape, jnp.bfloat16))
    real = quantize(weight.astype(jnp.bfloat16))
    described = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(real)]
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(abstract)] == described
    assert (abstract.shape, abstract.nbytes) == (real.shape, real.nbytes)
    validate(abstract, "weight")


# Refusals


def test_input_size_must_be_whole_blocks():
    with pytest.raises(ValueError, match="quantize: input size 100 is not a multiple of 16"):
        quantize(np.zeros((4, 100), np.float32))
    message = "^layers/q_proj/weight: input size 100 is not a multiple of 16$"
    for weight in (np.zeros((4, 100)), jax.ShapeDtypeStruct((2, 4, 100), jnp.bfloat16)):
        with pytest.raises(ValueError, match=message):
            check_weight(weight, "layers/q_proj/weight")
    with pytest.raises(ValueError, match=r"^norm: shape \(16,\) has no output and input axes$"):
        check_weight(np.zeros(16), "norm")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_weights_must_be_finite(value, dtype):
    weight = normal(8, (2, 4, 16)).astype(dtype)
    check_weight(weight, "w")
    weight[1, 2, [3, 4]] = value
    for array in (weight, jnp.asarray(weight)):
        with pytest.raises(ValueError, match=r"^layers/o: 2 of 128 values are not finite$"):
            check_weight(array, "layers/o")


def test_global_scale_must_fit_the_stack():
    unchecked = inspect.unwrap(quantize)  # without the shape checks of the test run
    with pytest.raises(ValueError, match=r"global_scale \(3,\) does not fit weight \(2, 4, 16\)"):
        unchecked(np.zeros((2, 4, 16), np.float32), global_scale=jnp.ones(3))


def test_rounding_must_be_known():
    with pytest.raises(ValueError, match=r"^round_to: float16 is neither float32 nor bfloat16"):
        quantize(np.zeros((4, 16), np.float32), round_to=jnp.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_scales": jnp.ones((2, 4, 1), jnp.float8_e4m3fn)}, r"\(2, 4, 1\)"),
        ({"global_scale": jnp.ones(3)}, r"\(3,\)"),
        ({"packed": jnp.ones((2, 4, 16), jnp.int8)}, "packed is int8, not uint8"),
        ({"packed": jnp.ones((2, 4, 12), jnp.uint8)}, r"\(2, 4, 12\)"),
        ({"global_scale": jnp.array([1.0, 0.0])}, r"\[1.0, 0.0\] is not positive and finite"),
        ({"global_scale": jnp.array([jnp.inf, 1.0])}, "is not positive and finite"),
        ({"global_scale": jnp.array([1.0, 1e-37])}, r"\[1.0, .*\] makes weights beyond bfloat16"),
        ({"block_scales": jnp.full((2, 4, 2), jnp.nan, jnp.float8_e4m3fn)}, "NaN or negative"),
        ({"block_scales": jnp.full((2, 4, 2), -1, jnp.float8_e4m3fn)}, "NaN or negative"),
    ],
)
def test_validate_refuses(change, message):
    q = quantize(normal(9, (2, 4, 32)))
    validate(q, "layers/k_proj/weight")
    with pytest.raises(ValueError, match=f"^layers/k_proj/weight: .*{message}"):
        validate(q.replace(**change), "layers/k_proj/weight")


def test_validate_skips_what_has_no_values():
    q = quantize(normal(10, (2, 4, 32)))
    validate(jax.tree.map(lambda leaf: None, q), "specs")
    jax.jit(lambda q: validate(q, "traced"))(q)
    wrong = q.replace(global_scale=jax.ShapeDtypeStruct((5,), jnp.float32))
    with pytest.raises(ValueError, match=r"^weight: .*\(5,\)"):
        validate(wrong, "weight")
