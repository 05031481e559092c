"""The adapter: initial values, the low-rank update, refusals, and what it must leave alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.lora import (
    BLOCK_NORMS,
    LoraAdapter,
    Trainable,
    check_lora,
    init_lora,
    init_trainable,
    lora_delta,
    lora_targets,
    overlay_norms,
)

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def params():
    """Two layers, hidden 32, key/value width 8, MLP 48."""
    sizes = {"q_proj": (32, 32), "k_proj": (8, 32), "v_proj": (8, 32), "o_proj": (32, 32)}
    sizes |= {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    layers = {name: {"weight": jnp.ones((2, *size), jnp.bfloat16)} for name, size in sizes.items()}
    layers["q_proj"]["bias"] = jnp.ones((2, 32))
    layers |= {name: jnp.full((2, 32), 1.5, jnp.float32) for name in BLOCK_NORMS}
    layers["q_norm"] = jnp.ones((2, 8))
    return {"embed_tokens": jnp.ones((7, 32)), "layers": layers, "norm": jnp.ones(32)}


def test_targets_are_the_projections_of_the_model(params):
    assert lora_targets(params) == ALL


def test_init_has_pefts_distribution(params, key):
    adapter = init_lora(key, params, targets=ALL, rank=4, alpha=8.0)
    assert adapter.scale == 2.0
    assert tuple(adapter.pairs) == ALL
    down = adapter.pairs["down_proj"]
    assert down["a"].shape == (2, 48, 4) and down["b"].shape == (2, 4, 32)
    assert down["a"].dtype == down["b"].dtype == jnp.float32
    for name, pair in adapter.pairs.items():
        bound = params["layers"][name]["weight"].shape[-1] ** -0.5
        a = np.asarray(pair["a"])
        assert np.abs(a).max() <= bound
        # U(-bound, bound) has this deviation; a normal draw or 1/rank would not.
        assert a.std() == pytest.approx(bound / 3**0.5, rel=0.12)
        assert abs(a.mean()) < 0.15 * bound
        assert not np.asarray(pair["b"]).any()
    assert not np.array_equal(adapter.pairs["q_proj"]["a"][0], adapter.pairs["q_proj"]["a"][1])


def test_draw_of_a_target_does_not_depend_on_the_others(params, key):
    every = init_lora(key, params, targets=ALL, rank=4, alpha=8.0)
    some = init_lora(key, params, targets=("v_proj", "q_proj"), rank=4, alpha=8.0)
    np.testing.assert_array_equal(some.pairs["q_proj"]["a"], every.pairs["q_proj"]["a"])
    assert not np.array_equal(every.pairs["k_proj"]["a"], every.pairs["v_proj"]["a"])
    other = init_lora(jax.random.key(1), params, targets=ALL, rank=4, alpha=8.0)
    assert not np.array_equal(other.pairs["q_proj"]["a"], every.pairs["q_proj"]["a"])


def test_delta_is_the_product(key):
    x, a, b = (
        np.asarray(jax.random.normal(k, shape), np.float64)
        for k, shape in zip(jax.random.split(key, 3), ((2, 5, 32), (32, 4), (4, 48)), strict=True)
    )
    pair = {"a": jnp.asarray(a, jnp.float32), "b": jnp.asarray(b, jnp.float32)}
    expected = 0.5 * (x @ a @ b)
    wide = lora_delta(jnp.asarray(x, jnp.float32), pair, scale=0.5)
    np.testing.assert_allclose(wide, expected, rtol=1e-5, atol=1e-4)
    narrow = lora_delta(jnp.asarray(x, jnp.bfloat16), pair, scale=0.5)
    assert wide.dtype == narrow.dtype == jnp.float32
    error = np.linalg.norm(np.asarray(narrow, np.float64) - expected) / np.linalg.norm(expected)
    assert error < 0.01


def test_gradient_reaches_float32_masters(key):
    pair = {"a": jnp.ones((32, 4)), "b": jnp.zeros((4, 8))}
    x = jax.random.normal(key, (3, 32), jnp.bfloat16)
    grads = jax.grad(lambda p: lora_delta(x, p, scale=2.0).astype(jnp.float32).sum())(pair)
    assert grads["b"].dtype == jnp.float32
    row = 2.0 * np.asarray(x, np.float32).sum()  # x a summed over rows, the same in each column
    np.testing.assert_allclose(grads["b"], np.full((4, 8), row), rtol=0.02)
    np.testing.assert_array_equal(grads["a"], np.zeros((32, 4)))


@pytest.mark.parametrize(
    ("targets", "rank", "message"),
    [
        (("q_proj", "qkv"), 4, f"lora.targets: 'qkv' is not one of {', '.join(ALL)}"),
        (("q_norm",), 4, f"lora.targets: 'q_norm' is not one of {', '.join(ALL)}"),
        (("q_proj", "q_proj"), 4, "lora.targets: 'q_proj' is listed twice"),
        ((), 4, f"lora.targets: is empty; choose from {', '.join(ALL)}"),
        (ALL, 0, "lora.rank: 0 is less than 1"),
        (("down_proj",), 33, "lora.rank: 33 exceeds 32, the smaller side of down_proj"),
        (("q_proj", "k_proj"), 9, "lora.rank: 9 exceeds 8, the smaller side of k_proj"),
    ],
)
def test_refusals(params, key, targets, rank, message):
    with pytest.raises(ValueError) as caught:
        init_lora(key, params, targets=targets, rank=rank, alpha=8.0)
    assert str(caught.value) == message


def test_largest_rank_and_abstract_params_are_accepted(params):
    shapes = jax.eval_shape(lambda: params)
    check_lora(shapes, targets=("k_proj",), rank=8)


def test_norms_are_overlaid_on_a_new_tree(params, key):
    before = jax.tree.map(np.array, params)
    trainable = init_trainable(
        key, params, targets=("q_proj",), rank=2, alpha=4.0, train_norms=True
    )
    assert set(trainable.norm_scales) == set(BLOCK_NORMS)
    np.testing.assert_array_equal(trainable.norm_scales["input_layernorm"], np.full((2, 32), 1.5))
    moved = trainable.replace(norm_scales=jax.tree.map(lambda s: s + 1, trainable.norm_scales))
    policy = overlay_norms(params, moved)
    for name in BLOCK_NORMS:
        np.testing.assert_array_equal(policy["layers"][name], np.full((2, 32), 2.5))
    assert policy["layers"]["q_proj"] is params["layers"]["q_proj"]
    assert jax.tree.structure(policy) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_donating_the_trainable_leaves_the_model_alive(params, key):
    trainable = init_trainable(key, params, targets=ALL, rank=2, alpha=4.0, train_norms=True)
    step = jax.jit(lambda t: jax.tree.map(lambda x: x * 2, t), donate_argnums=0)
    step(trainable)
    np.testing.assert_array_equal(params["layers"]["input_layernorm"], np.full((2, 32), 1.5))


def test_frozen_norms_leave_the_tree_itself(params, key):
    trainable = init_trainable(key, params, targets=ALL, rank=2, alpha=4.0, train_norms=False)
    assert trainable.norm_scales is None
    assert overlay_norms(params, trainable) is params


def test_containers_survive_tree_maps_to_shapes(params, key):
    trainable = init_trainable(key, params, targets=ALL, rank=2, alpha=4.0, train_norms=True)
    shapes = jax.eval_shape(lambda t: t, trainable)
    assert isinstance(shapes, Trainable) and isinstance(shapes.adapter, LoraAdapter)
    assert shapes.adapter.scale == 2.0
