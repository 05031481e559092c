import typing

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qerl_jax.optim import LEARNING_RATE_SCHEDULES, decay_mask, learning_rate_at, make_optimizer

SETTINGS = {
    "learning_rate": 0.1,
    "schedule": "cosine",
    "warmup_steps": 2,
    "total_steps": 6,
    "b1": 0.9,
    "b2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
}


@typing.no_type_check
@flax.struct.dataclass
class Adapter:
    """The shape of a LoRA adapter: stacked matrices and a static scale."""

    pairs: dict
    scale: float = flax.struct.field(pytree_node=False)


@typing.no_type_check
@flax.struct.dataclass
class Trained:
    """The shape of what is trained: an adapter, and norm scales or None."""

    adapter: Adapter
    norm_scales: dict | None


def make_trained(norms=True):
    rng = np.random.default_rng(0)
    pair = {"a": jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32), "b": jnp.ones((2, 3, 5))}
    scales = {"input_layernorm": jnp.full((2, 4), 3.0)} if norms else None
    return Trained(adapter=Adapter(pairs={"q_proj": pair}, scale=2.0), norm_scales=scales)


def rate(step, **changes):
    names = ("learning_rate", "schedule", "warmup_steps", "total_steps")
    return float(learning_rate_at(step, **{name: (SETTINGS | changes)[name] for name in names}))


def run(trained, gradients, steps, **changes):
    optimizer = make_optimizer(**(SETTINGS | changes))
    state = optimizer.init(trained)
    for _ in range(steps):
        updates, state = optimizer.update(gradients, state, trained)
        trained = optax.apply_updates(trained, updates)
    return trained


def test_warmup_then_cosine_by_hand():
    # Warm-up 1/2, 1; then (1 + cos(pi k / 4)) / 2 for k = 0..4, where k = 4 is past the end.
    expected = [0.05, 0.1, 0.1, 0.0853553, 0.05, 0.0146447, 0.0]
    np.testing.assert_allclose([rate(step) for step in range(7)], expected, rtol=1e-5, atol=1e-9)
    assert rate(100) == 0.0


def test_warmup_then_constant_by_hand():
    expected = [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]
    rates = [rate(step, schedule="constant", warmup_steps=4) for step in range(6)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    assert rate(1000, schedule="constant") == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", sorted(LEARNING_RATE_SCHEDULES))
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 5), (1, 5), (5, 5), (9, 5), (1, 1)])
def test_every_step_moves(schedule, warmup, total):
    rates = [
        rate(step, schedule=schedule, warmup_steps=warmup, total_steps=total)
        for step in range(total)
    ]
    assert all(0.0 < value <= 0.1 + 1e-7 for value in rates)


def test_against_numpy_adamw():
    rng = np.random.default_rng(1)
    gradients = rng.normal(size=(6, 2, 4, 3))
    weight = np.asarray(make_trained().adapter.pairs["q_proj"]["a"], np.float64)
    trained = {"adapter": {"a": jnp.asarray(weight, jnp.float32)}}
    optimizer = make_optimizer(**(SETTINGS | {"weight_decay": 0.3, "max_grad_norm": 1.5}))
    state = optimizer.init(trained)
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step, raw in enumerate(gradients):
        grads = {"adapter": {"a": jnp.asarray(raw, jnp.float32)}}
        updates, state = optimizer.update(grads, state, trained)
        trained = optax.apply_updates(trained, updates)
        gradient = raw * min(1.0, 1.5 / np.linalg.norm(raw))
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        direction = (first / (1 - 0.9 ** (step + 1))) / (
            np.sqrt(second / (1 - 0.99 ** (step + 1))) + 1e-8
        )
        weight = weight - rate(step) * (direction + 0.3 * weight)
    np.testing.assert_allclose(trained["adapter"]["a"], weight, rtol=1e-4, atol=1e-5)


def test_decay_falls_on_adapter_matrices_alone():
    trained = make_trained()
    mask = decay_mask(trained)
    assert mask.adapter.pairs["q_proj"] == {"a": True, "b": True}
    assert mask.norm_scales == {"input_layernorm": False}
    assert decay_mask(make_trained(norms=False)).norm_scales is None
    still = jax.tree.map(jnp.zeros_like, trained)
    decayed = run(trained, still, 1, weight_decay=0.5, schedule="constant", warmup_steps=0)
    np.testing.assert_allclose(decayed.adapter.pairs["q_proj"]["b"], 1.0 - 0.1 * 0.5, rtol=1e-6)
    np.testing.assert_array_equal(
        decayed.norm_scales["input_layernorm"], trained.norm_scales["input_layernorm"]
    )


def test_norm_scales_are_trained():
    trained = make_trained()
    moved = run(trained, jax.tree.map(jnp.ones_like, trained), 1, weight_decay=0.5)
    np.testing.assert_allclose(moved.norm_scales["input_layernorm"], 3.0 - 0.05, rtol=1e-5)


def test_decay_asks_for_both_the_place_and_the_rank():
    matrix, vector = jnp.ones((2, 3, 4)), jnp.ones((2, 3))
    trained = {"adapter": {"a": matrix, "v": vector}, "norm_scales": {"n": matrix}}
    expected = {"adapter": {"a": True, "v": False}, "norm_scales": {"n": False}}
    assert decay_mask(trained) == expected


def test_decay_that_falls_on_nothing_is_refused():
    with pytest.raises(ValueError, match=r"optimizer\.weight_decay: .* no adapter matrix"):
        make_optimizer(**(SETTINGS | {"weight_decay": 0.1})).init({"norm": jnp.ones((2, 3))})


def test_clipping_bounds_the_global_norm():
    trained = {"adapter": {"a": jnp.zeros((1, 1, 2))}}
    small = {"adapter": {"a": jnp.array([[[0.3, 0.4]]])}}
    large = jax.tree.map(lambda g: 100 * g, small)
    # A large eps keeps Adam from normalizing the size of the gradient away.
    moved = {
        name: run(trained, grads, 1, max_grad_norm=limit, eps=1e3)["adapter"]["a"]
        for name, grads, limit in (("small", small, 0.5), ("cut", large, 0.5), ("free", large, 0.0))
    }
    np.testing.assert_allclose(moved["cut"], moved["small"], rtol=1e-5)
    assert np.abs(moved["free"]).max() > 50 * np.abs(moved["cut"]).max()


def test_unknown_schedule_is_refused_at_once():
    with pytest.raises(ValueError, match=r'optimizer\.schedule: "cosin" is not one of constant, c'):
        make_optimizer(**(SETTINGS | {"schedule": "cosin"}))
