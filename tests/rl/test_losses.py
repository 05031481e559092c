"""The contract of every policy loss, then what each one does alone."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.contracts import LOSS_DATA
from qerl_jax.resolve import bind_keywords
from qerl_jax.rl.aggregation import token_weights
from qerl_jax.rl.losses import (
    POLICY_LOSSES,
    clipped_surrogate,
    grpo_token_loss,
    truncated_importance_weights,
)
from qerl_jax.rl.masking import masked_sum

LIMIT = 7  # tokens
HYPER = {"epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.1, "kl_estimator": "k3"}
NAMES = sorted(POLICY_LOSSES)
LENGTHS = np.array([1, 6, 2, 0, 5, 3, 6, 4])  # ragged, one row empty


def make_batch(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shape = (len(LENGTHS), 6)
    logprobs = rng.normal(-1.0, 0.5, shape)
    batch = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + rng.normal(0, 0.3, shape),  # many ratios beyond the clip
        "ref_logprobs": logprobs + rng.normal(0, 0.3, shape),
        "advantages": rng.normal(size=shape[0]),
        "completion_mask": np.arange(shape[1])[None, :] < LENGTHS[:, None],
    }
    return {name: jnp.asarray(value, jnp.float32) for name, value in batch.items()}


def token_loss(name, batch, hyper=None):
    fn = bind_keywords(POLICY_LOSSES[name].token_loss, hyper or HYPER, data=LOSS_DATA, place="loss")
    return fn(**batch)


def total(name, batch, hyper=None):
    weights = token_weights(
        batch["completion_mask"],
        aggregation=POLICY_LOSSES[name].aggregation,
        max_completion_tokens=LIMIT,
    )
    return masked_sum(token_loss(name, batch, hyper)[0], weights)


def value_and_gradient(name, batch, hyper=None):
    def of_logprobs(logprobs):
        return total(name, batch | {"logprobs": logprobs}, hyper)

    value, gradient = jax.value_and_grad(of_logprobs)(batch["logprobs"])
    return float(value), np.asarray(gradient)


def oracle(name: str, batch: dict[str, jax.Array]) -> tuple[float, np.ndarray]:
    """Loss and gradient in float64, token by token, written from the papers."""
    arrays = {key: np.asarray(value, np.float64) for key, value in batch.items()}
    rows, columns = arrays["logprobs"].shape
    tokens = arrays["completion_mask"].sum()
    value, gradient = 0.0, np.zeros((rows, columns))
    for i in range(rows):
        advantage, length = arrays["advantages"][i], arrays["completion_mask"][i].sum()
        for t in range(columns):
            if not arrays["completion_mask"][i, t]:
                continue
            weight = {"grpo": 1 / (rows * length), "dapo": 1 / tokens, "dr_grpo": 1 / (rows * 7)}
            log_p = arrays["logprobs"][i, t]
            ratio = np.exp(log_p - arrays["old_logprobs"][i, t])
            inactive = ratio > 1.28 if advantage > 0 else ratio < 0.8
            loss = -min(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
            slope = 0.0 if inactive else -ratio * advantage
            if name == "grpo":
                d = arrays["ref_logprobs"][i, t] - log_p
                loss += 0.1 * (np.exp(d) - d - 1)
                slope += 0.1 * (1 - np.exp(d))
            value += weight[name] * loss
            gradient[i, t] = weight[name] * slope
    return value, gradient


def test_aggregations_are_those_of_the_papers():
    assert {name: loss.aggregation for name, loss in POLICY_LOSSES.items()} == {
        "grpo": "sequence_mean",
        "dapo": "token_mean",
        "dr_grpo": "fixed_length_mean",
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_against_float64_oracle(name, seed):
    batch = make_batch(seed)
    value, gradient = value_and_gradient(name, batch)
    expected_value, expected_gradient = oracle(name, batch)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(name):
    batch = make_batch()
    padded = {
        key: value if value.ndim == 1 else jnp.pad(value, ((0, 0), (0, 5)))
        for key, value in batch.items()
    }
    value, gradient = value_and_gradient(name, batch)
    padded_value, padded_gradient = value_and_gradient(name, padded)
    np.testing.assert_allclose(padded_value, value, rtol=1e-6)
    np.testing.assert_allclose(padded_gradient[:, :6], gradient, rtol=1e-6)
    np.testing.assert_array_equal(padded_gradient[:, 6:], 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_permuting_groups_changes_nothing(name):
    batch = make_batch()
    order = np.array([4, 5, 0, 1, 6, 7, 2, 3])  # groups of two
    value, gradient = value_and_gradient(name, batch)
    permuted = {key: array[order] for key, array in batch.items()}
    permuted_value, permuted_gradient = value_and_gradient(name, permuted)
    np.testing.assert_allclose(permuted_value, value, rtol=1e-6)
    np.testing.assert_allclose(permuted_gradient, gradient[order], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_masked_positions_are_not_read(name, junk):
    batch = make_batch()
    value, gradient = value_and_gradient(name, batch)
    hidden = batch["completion_mask"] == 0
    spoilt = dict(batch)
    for key in ("logprobs", "old_logprobs", "ref_logprobs"):
        spoilt[key] = jnp.where(hidden, junk, batch[key])
    spoilt["advantages"] = jnp.where(jnp.asarray(LENGTHS) == 0, junk, batch["advantages"])
    spoilt_value, spoilt_gradient = value_and_gradient(name, spoilt)
    assert spoilt_value == value
    np.testing.assert_array_equal(spoilt_gradient, gradient)
    per_token, statistics = token_loss(name, spoilt)
    np.testing.assert_array_equal(per_token[hidden], 0.0)
    for statistic in statistics.values():
        assert jnp.isfinite(statistic).all()


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    junk=hnp.arrays(np.float32, (8, 6), elements=st.floats(width=32)), name=st.sampled_from(NAMES)
)
def test_any_masked_content_changes_nothing(junk, name):
    batch = make_batch()
    spoilt = batch | {"logprobs": jnp.where(batch["completion_mask"] == 0, junk, batch["logprobs"])}
    assert value_and_gradient(name, spoilt)[0] == value_and_gradient(name, batch)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("epsilon", [0.0, 0.2])
def test_on_policy_value_and_gradient(name, epsilon):
    # epsilon 0 puts every token on both bounds at once; its gradient must stay whole.
    hyper = HYPER | {"epsilon_low": epsilon, "epsilon_high": epsilon}
    batch = make_batch()
    batch |= {"old_logprobs": batch["logprobs"], "ref_logprobs": batch["logprobs"]}
    weights = token_weights(
        batch["completion_mask"],
        aggregation=POLICY_LOSSES[name].aggregation,
        max_completion_tokens=LIMIT,
    )
    expected = -np.asarray(weights * batch["advantages"][:, None])
    value, gradient = value_and_gradient(name, batch, hyper)
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-5)
    np.testing.assert_array_equal(gradient, expected)
    _, statistics = token_loss(name, batch, hyper)
    np.testing.assert_array_equal(statistics["ratio"], 1.0)
    np.testing.assert_array_equal(statistics["clipped_low"], 0.0)
    np.testing.assert_array_equal(statistics["clipped_high"], 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_descent_raises_what_was_good_and_lowers_what_was_bad(name):
    batch = make_batch() | {"advantages": jnp.array([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0, 1.0])}
    batch["old_logprobs"] = batch["logprobs"]
    _, gradient = value_and_gradient(name, batch, HYPER | {"beta": 0.0})
    signs = -np.asarray(batch["advantages"][:, None] * batch["completion_mask"])
    np.testing.assert_array_equal(np.sign(gradient), signs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 4])
def test_accumulation_gives_the_same_update(name, size):
    batch = make_batch()
    weights = token_weights(
        batch["completion_mask"],
        aggregation=POLICY_LOSSES[name].aggregation,
        max_completion_tokens=LIMIT,
    )

    def micro_loss(shift, start):  # one parameter shared by all rows
        part = {key: value[start : start + size] for key, value in batch.items()}
        part["logprobs"] = part["logprobs"] + shift
        return masked_sum(token_loss(name, part)[0], weights[start : start + size])

    accumulated = sum(jax.grad(micro_loss)(0.0, start) for start in range(0, 8, size))
    np.testing.assert_allclose(accumulated, value_and_gradient(name, batch)[1].sum(), rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_batch_without_a_token_gives_zero(name):
    batch = make_batch() | {"completion_mask": jnp.zeros((8, 6))}
    value, gradient = value_and_gradient(name, batch)
    assert value == 0.0
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [-200.0, 200.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_far_policies_do_not_overflow(name, gap, advantage):
    batch = make_batch() | {"advantages": jnp.full(8, advantage)}
    batch["old_logprobs"] = batch["logprobs"] - gap
    batch["ref_logprobs"] = batch["logprobs"] - gap
    value, gradient = value_and_gradient(name, batch)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradient_reaches_the_policy_alone(name):
    batch = make_batch()
    floats = ("old_logprobs", "ref_logprobs", "advantages")
    gradients = jax.grad(lambda others: total(name, batch | others))({k: batch[k] for k in floats})
    for gradient in jax.tree.leaves(gradients):
        np.testing.assert_array_equal(gradient, 0.0)


# Ratio, advantage -> surrogate and its slope in log-ratio, by hand for bounds 0.8 and 1.28.
SURROGATE = [
    (1.25, 1.0, 1.25, 1.25),  # inside clip-higher; a bound of 1.2 would clip it
    (1.5, 1.0, 1.28, 0.0),
    (1.5, -1.0, -1.5, -1.5),  # a bad token grown likelier is pushed back however far
    (0.5, 1.0, 0.5, 0.5),
    (0.5, -1.0, -0.8, 0.0),
    (1.0, 2.0, 2.0, 2.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "value", "slope"), SURROGATE)
def test_clipped_surrogate(ratio, advantage, value, slope):
    def surrogate(log_ratio):
        return clipped_surrogate(
            log_ratio[None, None], jnp.array([advantage]), epsilon_low=0.2, epsilon_high=0.28
        )[0, 0]

    got_value, got_slope = jax.value_and_grad(surrogate)(jnp.log(jnp.float32(ratio)))
    np.testing.assert_allclose([got_value, got_slope], [value, slope], rtol=1e-6)


def test_clip_statistics_count_tokens_without_gradient():
    ratios = jnp.array([[1.5, 0.5, 1.0], [1.5, 0.5, 1.0]])
    batch = {
        "logprobs": jnp.log(ratios),
        "old_logprobs": jnp.zeros((2, 3)),
        "ref_logprobs": None,
        "advantages": jnp.array([1.0, -1.0]),
        "completion_mask": jnp.ones((2, 3)),
    }
    _, statistics = token_loss("dapo", batch)
    np.testing.assert_array_equal(statistics["clipped_high"], [[1, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(statistics["clipped_low"], [[0, 0, 0], [0, 1, 0]])
    np.testing.assert_allclose(statistics["ratio"], ratios, rtol=1e-6)


@pytest.mark.parametrize(("estimator", "pulls"), [("k1", False), ("k2", True), ("k3", True)])
def test_reference_changes_the_gradient(estimator, pulls):
    hyper = HYPER | {"kl_estimator": estimator}
    batch = make_batch()
    moved = batch | {"ref_logprobs": batch["ref_logprobs"] - 0.5}
    value, gradient = value_and_gradient("grpo", batch, hyper)
    moved_value, moved_gradient = value_and_gradient("grpo", moved, hyper)
    assert value != moved_value
    assert np.array_equal(gradient, moved_gradient) is not pulls  # k1 in the loss is blind


def test_kl_statistic_and_weight():
    batch = make_batch()
    plain, statistics = token_loss("grpo", batch, HYPER | {"beta": 0.0})
    with_kl, _ = token_loss("grpo", batch)
    np.testing.assert_allclose(with_kl - plain, 0.1 * statistics["kl"], rtol=1e-4, atol=1e-6)
    assert "kl" not in token_loss("dapo", batch)[1]


def test_beta_zero_needs_no_reference():
    batch = make_batch() | {"ref_logprobs": None}
    loss, statistics = token_loss("grpo", batch, HYPER | {"beta": 0.0})
    assert jnp.isfinite(loss).all()
    assert "kl" not in statistics


def test_bad_arguments_are_refused():
    batch = make_batch()
    with pytest.raises(ValueError, match=r"loss\.beta: 0\.1 needs ref_logprobs"):
        token_loss("grpo", batch | {"ref_logprobs": None})
    with pytest.raises(ValueError, match=r'loss\.kl_estimator: "k4" is not one of k1, k2, k3'):
        grpo_token_loss(**batch, epsilon_low=0.2, epsilon_high=0.2, kl_estimator="k4")


def test_temperature_must_be_in_both_logprobs():
    # One token, logits (2, 1, 0, -1): p0 is 0.6439 at T = 1 and 0.8122 at T = 0.6.
    logits = jnp.array([2.0, 1.0, 0.0, -1.0])
    cold = jax.nn.log_softmax(logits / 0.6)[:1][None]
    warm = jax.nn.log_softmax(logits)[:1][None]
    np.testing.assert_allclose(jnp.exp(jnp.concatenate([cold, warm])[:, 0]), [0.8122, 0.6439], 1e-4)
    batch = {
        "old_logprobs": cold,
        "ref_logprobs": None,
        "advantages": jnp.ones(1),
        "completion_mask": jnp.ones((1, 1)),
    }
    assert token_loss("dapo", batch | {"logprobs": cold})[1]["ratio"] == 1.0
    forgotten = token_loss("dapo", batch | {"logprobs": warm})[1]["ratio"]
    np.testing.assert_allclose(forgotten, [[0.793]], atol=5e-4)


def test_truncated_importance_weights():
    trainer, sampler = jnp.log(jnp.array([[0.5, 0.9, 0.2]])), jnp.log(jnp.array([[0.4, 0.1, 0.4]]))
    weights = truncated_importance_weights(trainer, sampler, jnp.ones((1, 3)), cap=2.0)
    np.testing.assert_allclose(weights, [[1.25, 2.0, 0.5]], rtol=1e-6)


def test_importance_weights_are_constants_and_ignore_masked_positions():
    trainer, sampler = jnp.array([[-1.0, jnp.nan, 300.0]]), jnp.array([[-1.5, jnp.inf, -300.0]])
    mask = jnp.array([[1.0, 0.0, 1.0]])

    def weighted(trainer):
        return masked_sum(truncated_importance_weights(trainer, sampler, mask, cap=3.0), mask)

    value, gradient = jax.value_and_grad(weighted)(trainer)
    np.testing.assert_allclose(value, np.exp(0.5) + 3.0, rtol=1e-6)
    np.testing.assert_array_equal(gradient, 0.0)
    assert truncated_importance_weights(trainer, sampler, mask, cap=3.0)[0, 1] == 1.0


def test_importance_cap_must_be_positive():
    with pytest.raises(ValueError, match=r"loss\.importance_cap: 0\.0 is not above 0"):
        truncated_importance_weights(
            jnp.zeros((1, 1)), jnp.zeros((1, 1)), jnp.ones((1, 1)), cap=0.0
        )
