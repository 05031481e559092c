"""Names, selection and sizes, on a tree with one container in it."""

import typing

import flax
import jax
import jax.numpy as jnp
import pytest

from qerl_jax import tree


@typing.no_type_check
@flax.struct.dataclass
class Packed:
    codes: jax.Array
    scale: jax.Array


@pytest.fixture
def params():
    packed = Packed(codes=jnp.zeros((2, 4, 8), jnp.uint8), scale=jnp.ones((2,), jnp.float32))
    return {
        "embed_tokens": jnp.zeros((5, 3), jnp.bfloat16),
        "layers": {
            "input_layernorm": jnp.ones((2, 3), jnp.float32),
            "q_proj": {"weight": packed, "bias": jnp.zeros((2, 4), jnp.float32)},
            "o_proj": {"weight": jnp.zeros((2, 4, 4), jnp.float32)},
        },
    }


def test_a_container_is_one_weight_and_several_arrays(params):
    assert set(tree.flatten_weights(params)) == {
        "embed_tokens",
        "layers/input_layernorm",
        "layers/q_proj/weight",
        "layers/q_proj/bias",
        "layers/o_proj/weight",
    }
    arrays = tree.flatten_arrays(params)
    assert {name for name in arrays if "q_proj" in name} == {
        "layers/q_proj/bias",
        "layers/q_proj/weight/codes",
        "layers/q_proj/weight/scale",
    }
    assert arrays["embed_tokens"] is params["embed_tokens"]


def test_unflatten_is_the_inverse(params):
    rebuilt = tree.unflatten_weights(tree.flatten_weights(params))
    assert jax.tree.structure(rebuilt) == jax.tree.structure(params)


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("layers/q_proj/weight", True),
        ("layers/*_proj/weight", True),
        ("*/*/*", True),
        ("layers/*", False),  # a star does not cross "/"
        ("q_proj/weight", False),  # nor is the front free
        ("layers/Q_proj/weight", False),
    ],
)
def test_matches(pattern, fits):
    assert tree.matches("layers/q_proj/weight", pattern) is fits


def test_select_keeps_tree_order_and_repeats_nothing(params):
    patterns = ("layers/o_proj/weight", "layers/*_proj/weight")
    chosen = tree.select(params, patterns)
    assert chosen == ("layers/q_proj/weight", "layers/o_proj/weight")


def test_select_refuses_a_pattern_that_fits_nothing(params):
    with pytest.raises(ValueError, match=r"^layers/k_proj/weight: fits none of the 5 weights"):
        tree.select(params, ("layers/q_proj/weight", "layers/k_proj/weight"))


def test_sizes_of_real_and_abstract_trees_agree(params):
    elements = 5 * 3 + 2 * 3 + 2 * 4 * 8 + 2 + 2 * 4 + 2 * 4 * 4
    size = 2 * 5 * 3 + 4 * 2 * 3 + 2 * 4 * 8 + 4 * 2 + 4 * 2 * 4 + 4 * 2 * 4 * 4
    abstract = jax.eval_shape(lambda: params)
    assert tree.num_elements(params) == tree.num_elements(abstract) == elements
    assert tree.num_bytes(params) == tree.num_bytes(abstract) == size
    assert tree.num_bytes({}) == 0


@pytest.mark.parametrize("shape", [(24, 896), (28, 1536), (16,), (1, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_fingerprint_sees_changes_of_all_values_alike(shape, dtype):
    """A plain sum of bits would lose them: what they add is a multiple of 2^32."""
    values = jnp.full(shape, 1.5, jnp.float32)
    changed = [values, -values, 2 * values, 4 * values, 16 * values, 0 * values, values - 0.5]
    assert len({tree.fingerprint({"x": x.astype(dtype)}) for x in changed}) == len(changed)


def test_a_fingerprint_is_of_every_name_shape_and_bit():
    values = {"a": jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4), "b": jnp.ones(5, jnp.float32)}
    first = tree.fingerprint(values)
    assert first == tree.fingerprint(jax.tree.map(jnp.copy, values))
    for other in (
        {"a": values["a"], "c": values["b"]},
        {**values, "a": values["a"].T},
        {**values, "a": values["a"][::-1]},
        {**values, "a": values["a"][:, ::-1]},
        {**values, "a": values["a"].at[1, 2].multiply(-1)},
        {**values, "a": values["a"].at[1, jnp.array([2, 3])].set(values["a"][1, 3:1:-1])},
        {**values, "b": values["b"].at[4].add(2.0**-23)},
    ):
        assert tree.fingerprint(other) != first
