"""Which weights become NVFP4, and that fused layers share a global scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.quant import (
    FUSED_GROUPS,
    LINEAR_WEIGHTS,
    NvFp4Tensor,
    dequantize,
    fused_group,
    global_scale_of,
    quantize,
    quantize_params,
)

LAYERS, EMBED, FFN = 2, 32, 48
SIZES = {
    "q_proj": (EMBED, EMBED),
    "k_proj": (16, EMBED),
    "v_proj": (16, EMBED),
    "o_proj": (EMBED, EMBED),
    "gate_proj": (FFN, EMBED),
    "up_proj": (FFN, EMBED),
    "down_proj": (EMBED, FFN),
}


def make_params(sizes=SIZES, dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    layers = {name: {"weight": draw(LAYERS, *shape)} for name, shape in sizes.items()}
    layers["q_proj"]["bias"] = draw(LAYERS, EMBED)
    layers["input_layernorm"] = draw(LAYERS, EMBED)
    return {"embed_tokens": draw(64, EMBED), "layers": layers, "norm": draw(EMBED)}


def test_linear_weights_become_nvfp4_and_nothing_else_changes():
    params = make_params()
    result = quantize_params(params)
    for name, shape in SIZES.items():
        weight = result["layers"][name]["weight"]
        assert isinstance(weight, NvFp4Tensor) and weight.shape == (LAYERS, *shape)
    assert result["embed_tokens"] is params["embed_tokens"]
    assert result["norm"] is params["norm"]
    assert result["layers"]["q_proj"]["bias"] is params["layers"]["q_proj"]["bias"]
    assert result["layers"]["input_layernorm"] is params["layers"]["input_layernorm"]
    assert isinstance(params["layers"]["q_proj"]["weight"], jax.Array)  # the input is untouched


def test_fused_layers_share_the_scale_of_the_largest_in_each_layer():
    params = make_params()
    layers = params["layers"]
    layers["k_proj"]["weight"] = layers["k_proj"]["weight"].at[0].multiply(10)
    layers["v_proj"]["weight"] = layers["v_proj"]["weight"].at[1].multiply(100)
    result = quantize_params(params)["layers"]
    own = {name: np.asarray(global_scale_of(layers[name]["weight"])) for name in SIZES}
    for group in FUSED_GROUPS:
        smallest = np.min([own[name] for name in group], axis=0)
        for name in group:
            assert np.array_equal(result[name]["weight"].global_scale, smallest)
    assert result["q_proj"]["weight"].global_scale[0] == own["k_proj"][0]
    assert result["q_proj"]["weight"].global_scale[1] == own["v_proj"][1]
    for name in ("o_proj", "down_proj"):
        assert np.array_equal(result[name]["weight"].global_scale, own[name])


def test_an_all_zero_member_does_not_set_the_shared_scale():
    params = make_params()
    layers = params["layers"]
    layers["v_proj"]["weight"] = jnp.zeros_like(layers["v_proj"]["weight"])
    layers["q_proj"]["weight"] *= 1e-3
    layers["k_proj"]["weight"] *= 1e-3
    result = quantize_params(params)["layers"]
    for name in ("q_proj", "k_proj"):
        dense = np.asarray(layers[name]["weight"])
        error = np.linalg.norm(dequantize(result[name]["weight"], dtype=jnp.float32) - dense)
        assert error < 0.1 * np.linalg.norm(dense)
    assert not np.any(dequantize(result["v_proj"]["weight"]))


def test_only_what_is_included():
    params = make_params()
    result = quantize_params(params, include=["layers/[gu]*_proj/weight"])["layers"]
    chosen = {n for n in SIZES if isinstance(result[n]["weight"], NvFp4Tensor)}
    assert chosen == {"gate_proj", "up_proj"}
    assert result["q_proj"]["weight"] is params["layers"]["q_proj"]["weight"]


def test_rounding_is_passed_on():
    params = make_params(dtype=jnp.bfloat16)
    weight = params["layers"]["o_proj"]["weight"]
    got = quantize_params(params, round_to=jnp.bfloat16)["layers"]["o_proj"]["weight"]
    want = quantize(weight, round_to=jnp.bfloat16)
    assert np.array_equal(got.global_scale, want.global_scale)
    assert np.array_equal(got.packed, want.packed)
    assert not np.array_equal(got.global_scale, quantize(weight).global_scale)


def test_nvfp4_weights_stay_as_they_are():
    once = quantize_params(make_params())
    twice = quantize_params(once)
    for name in SIZES:
        assert twice["layers"][name]["weight"] is once["layers"][name]["weight"]


def test_abstract_parameters():
    params = make_params()
    abstract = jax.eval_shape(quantize_params, params)
    real = quantize_params(params)
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    shapes = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, abstract, real)
    assert all(jax.tree.leaves(shapes))


def test_a_pattern_that_fits_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^layers/qkv_proj/weight: fits none"):
        quantize_params(make_params(), include=[*LINEAR_WEIGHTS, "layers/qkv_proj/weight"])


def test_a_size_that_does_not_fit_is_refused_by_name():
    params = make_params({**SIZES, "down_proj": (EMBED, 100)})
    with pytest.raises(ValueError, match=r"^layers/down_proj/weight: input size 100 is not a mult"):
        quantize_params(params)


def test_not_finite_weights_are_refused_by_name():
    params = make_params()
    up = params["layers"]["up_proj"]
    up["weight"] = up["weight"].at[1, 2, 3].set(jnp.nan)
    with pytest.raises(
        ValueError, match=r"^layers/up_proj/weight: 1 of 3072 values are not finite$"
    ):
        quantize_params(params)


@pytest.mark.parametrize("name", LINEAR_WEIGHTS)
def test_fused_group_holds_the_weight_itself(name):
    group = fused_group(name)
    assert name in group and len(group) == (
        3 if "layers/q_proj/weight" in group else 2 if "layers/up_proj/weight" in group else 1
    )
    assert all(fused_group(member) == group for member in group)
