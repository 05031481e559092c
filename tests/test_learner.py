"""The optimizer step on a policy small enough to compute by hand: a table of next-token logits.

The expected numbers come from NumPy in float64, written apart from the code under test.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qerl_jax.contracts import LOSS_DATA
from qerl_jax.learner import TrainBatch, TrainState, make_logprobs, make_update_step
from qerl_jax.models import TokenBatch
from qerl_jax.resolve import bind_keywords
from qerl_jax.rl import AGGREGATIONS, POLICY_LOSSES, token_weights

VOCAB, ROWS, LENGTH = 5, 4, 3
LENGTHS = np.array([3, 1, 2, 3])
ADVANTAGES = np.array([1.0, -0.5, 2.0, -1.5])
MASK = np.arange(LENGTH)[None, :] < LENGTHS[:, None]
RNG = np.random.default_rng(0)
PROMPTS = RNG.integers(0, VOCAB, (ROWS, 2))
COMPLETIONS = RNG.integers(0, VOCAB, (ROWS, LENGTH))
BASE = RNG.standard_normal((VOCAB, VOCAB))
NOISE = 0.1 * RNG.standard_normal((ROWS, LENGTH))
PREVIOUS = np.concatenate([PROMPTS[:, -1:], COMPLETIONS[:, :-1]], axis=1)


def table_logprobs(params, trainable, tokens, noise_key, sigma):
    """Read log-probabilities and entropies off the table base + trained + sigma."""
    previous = jnp.concatenate([tokens.prompt_ids[:, -1:], tokens.completion_ids[:, :-1]], axis=1)
    logits = (params["table"] + trainable["table"] * (1.0 + sigma))[previous]
    normalized = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(normalized, tokens.completion_ids[..., None], axis=-1)[..., 0]
    return picked, jax.lax.stop_gradient(-jnp.sum(jnp.exp(normalized) * normalized, axis=-1))


def expected_logprobs(table):
    """Return (log-probs [rows, length], probabilities [rows, length, vocab]) in float64."""
    logits = table[PREVIOUS]
    normalized = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    picked = np.take_along_axis(normalized, COMPLETIONS[..., None], axis=-1)[..., 0]
    return picked, np.exp(normalized)


def gradient(token_gradients, table):
    """Sum d loss / d logprob over the tokens into the gradient of the table."""
    _, probabilities = expected_logprobs(table)
    total = np.zeros((VOCAB, VOCAB))
    scores = np.eye(VOCAB)[COMPLETIONS] - probabilities
    np.add.at(total, PREVIOUS, token_gradients[..., None] * scores)
    return total


LOGPROBS, PROBABILITIES = expected_logprobs(BASE)


def loss_of(name="grpo", **hyper):
    values = {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "kl_estimator": "k3"} | hyper
    return bind_keywords(POLICY_LOSSES[name].token_loss, values, data=LOSS_DATA, place="loss")


def floats(x):
    return None if x is None else jnp.asarray(x, jnp.float32)


def batch_of(*, mask=MASK, aggregation="token_mean", sampler=LOGPROBS, old=None, ref=None, **other):
    return TrainBatch(
        tokens=TokenBatch(
            prompt_ids=jnp.asarray(PROMPTS, jnp.int32),
            prompt_mask=jnp.ones((ROWS, 2), bool),
            completion_ids=jnp.asarray(COMPLETIONS, jnp.int32),
            completion_mask=jnp.asarray(MASK),
        ),
        advantages=floats(other.get("advantages", ADVANTAGES)),
        loss_mask=jnp.asarray(mask),
        token_weights=token_weights(
            floats(mask), aggregation=aggregation, max_completion_tokens=LENGTH + 2
        ),
        sampler_logprobs=floats(sampler),
        old_logprobs=floats(old),
        ref_logprobs=floats(ref),
    )


def update(batch, *, micro=ROWS, steps=1, learning_rate=1.0, loss=None, **options):
    """Take SGD steps from the base; returns (change of the table, metrics of the last step)."""
    optimizer = optax.sgd(learning_rate)
    trainable = {"table": jnp.zeros((VOCAB, VOCAB))}
    state = TrainState(
        step=jnp.int32(7),
        trainable=trainable,
        opt_state=optimizer.init(trainable),
        key=jax.random.key(3),
    )
    update_step = make_update_step(
        table_logprobs, loss or loss_of(), optimizer, micro_batch_size=micro, **options
    )
    params = {"table": floats(BASE)}
    for _ in range(steps):
        state, metrics = update_step(state, params, batch, jax.random.key(0), jnp.float32(0.0))
    assert (int(state.step), state.key) == (7, jax.random.key(3))
    np.testing.assert_array_equal(params["table"], BASE.astype(np.float32))
    return np.asarray(state.trainable["table"]), {k: float(v) for k, v in metrics.items()}


def test_on_policy_the_update_is_the_policy_gradient():
    change, metrics = update(batch_of(sampler=LOGPROBS + NOISE))
    weights = MASK / MASK.sum()
    expected = gradient(weights * ADVANTAGES[:, None], BASE)
    np.testing.assert_allclose(change, expected, atol=1e-6)
    entropy = -(PROBABILITIES * np.log(PROBABILITIES)).sum(axis=-1)
    for name, value in {
        "loss": -(weights * ADVANTAGES[:, None]).sum(),
        "grad_norm": np.sqrt((expected**2).sum()),
        "ratio": 1.0,
        "clipped_low": 0.0,
        "clipped_high": 0.0,
        "entropy": entropy[MASK].mean(),
        "logprob_gap": np.abs(NOISE[MASK]).mean(),
        "loss_tokens": 9.0,
    }.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name
    assert "kl" not in metrics and "importance_weight" not in metrics


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_cut_into_micro_batches_does_not_matter(aggregation):
    options = {"old": LOGPROBS + 3 * NOISE, "ref": LOGPROBS - NOISE, "aggregation": aggregation}
    batch, loss = batch_of(**options), loss_of(beta=0.5)
    whole, metrics = update(batch, loss=loss, importance_cap=1.05)
    assert np.abs(whole).max() > 0.01
    for micro in (1, 2):
        cut, cut_metrics = update(batch, micro=micro, loss=loss, importance_cap=1.05)
        np.testing.assert_allclose(cut, whole, atol=1e-6)
        assert cut_metrics == pytest.approx(metrics, abs=1e-6)


def test_aggregations_weigh_ragged_rows_differently():
    changes = {}
    for name in AGGREGATIONS:
        change, _ = update(batch_of(aggregation=name))
        weights = {
            "token_mean": MASK / 9,
            "sequence_mean": MASK / LENGTHS[:, None] / ROWS,
            "fixed_length_mean": MASK / (ROWS * (LENGTH + 2)),
        }[name]
        np.testing.assert_allclose(change, gradient(weights * ADVANTAGES[:, None], BASE), atol=1e-6)
        changes[name] = change
    assert np.abs(changes["token_mean"] - changes["sequence_mean"]).max() > 0.01
    assert np.abs(changes["token_mean"] - changes["fixed_length_mean"]).max() > 0.01


def test_masked_rows_carry_no_loss_but_count_in_the_entropy():
    mask = MASK & np.array([True, True, False, True])[:, None]
    change, metrics = update(batch_of(mask=mask))
    expected = gradient(mask / mask.sum() * ADVANTAGES[:, None], BASE)
    np.testing.assert_allclose(change, expected, atol=1e-6)
    assert metrics["loss_tokens"] == 7.0
    assert metrics["entropy"] == pytest.approx(update(batch_of())[1]["entropy"])


def test_what_padding_holds_does_not_matter():
    def spoiled(x):
        return np.where(MASK, x, np.nan)

    clean = {"old": LOGPROBS + NOISE, "ref": LOGPROBS - NOISE, "sampler": LOGPROBS + 2 * NOISE}
    loss = loss_of(beta=0.5)
    change, metrics = update(batch_of(**clean), loss=loss, importance_cap=2.0)
    again, same = update(
        batch_of(**{k: spoiled(v) for k, v in clean.items()}), loss=loss, importance_cap=2.0
    )
    np.testing.assert_array_equal(change, again)
    assert metrics == same


def test_a_batch_without_any_loss_token_changes_nothing():
    change, metrics = update(batch_of(mask=np.zeros_like(MASK)))
    np.testing.assert_array_equal(change, np.zeros_like(change))
    assert (metrics["loss"], metrics["grad_norm"], metrics["loss_tokens"]) == (0.0, 0.0, 0.0)
    assert np.isnan(metrics["ratio"]) and np.isfinite(metrics["entropy"])  # a mean of nothing


def test_tokens_outside_the_clip_range_have_no_gradient():
    # Row by row: too high with A > 0, too low with A < 0, inside, too low with A > 0.
    shifts = np.array([[0.5], [-0.6], [0.1], [-0.6]])
    advantages = np.array([1.0, -1.0, 1.0, 1.0])
    change, metrics = update(batch_of(old=LOGPROBS - shifts, advantages=advantages))
    ratio = np.broadcast_to(np.exp(shifts), MASK.shape)
    alive = np.array([[0.0], [0.0], [1.0], [1.0]])
    weights = MASK / 9 * alive * ratio * advantages[:, None]
    np.testing.assert_allclose(change, gradient(weights, BASE), atol=1e-6)
    assert metrics["clipped_high"] == pytest.approx(3 / 9)
    assert metrics["clipped_low"] == pytest.approx(1 / 9)
    assert metrics["ratio"] == pytest.approx(ratio[MASK].mean(), abs=1e-6)


def test_old_logprobs_make_a_second_step_off_policy():
    fixed = batch_of(old=LOGPROBS)
    change, metrics = update(fixed, steps=2, learning_rate=3.0)
    assert metrics["clipped_high"] > 0 and metrics["ratio"] != pytest.approx(1.0, abs=1e-3)
    # Without them each forward is its own denominator, and no bound ever acts.
    free, metrics = update(batch_of(), steps=2, learning_rate=3.0)
    assert (metrics["clipped_high"], metrics["ratio"]) == (0.0, 1.0)
    assert np.abs(free - change).max() > 0.1


def test_importance_weights_multiply_token_losses_up_to_the_cap():
    change, metrics = update(batch_of(sampler=LOGPROBS - 3 * NOISE), importance_cap=1.1)
    weights = np.minimum(np.exp(3 * NOISE), 1.1)
    assert (weights[MASK] == 1.1).any() and (weights[MASK] < 1.0).any()
    expected = gradient(MASK / 9 * weights * ADVANTAGES[:, None], BASE)
    np.testing.assert_allclose(change, expected, atol=1e-6)
    assert metrics["importance_weight"] == pytest.approx(weights[MASK].mean(), abs=1e-6)


def test_importance_weights_compare_the_old_policy_with_the_sampler():
    # Not the policy under update: the weight is the same in every iteration.
    given = batch_of(old=LOGPROBS, sampler=LOGPROBS - 0.05)
    _, first = update(given, importance_cap=2.0)
    _, second = update(given, importance_cap=2.0, steps=2)
    assert first["importance_weight"] == second["importance_weight"] == pytest.approx(np.exp(0.05))


def test_kl_pulls_towards_the_reference():
    reference = LOGPROBS - 2 * NOISE
    batch = batch_of(ref=reference, advantages=np.zeros(ROWS))
    change, metrics = update(batch, loss=loss_of(beta=0.5), learning_rate=0.1)
    d = 2 * NOISE  # policy minus reference; k3 = exp(-d) + d - 1
    assert metrics["kl"] == pytest.approx((np.exp(-d) + d - 1)[MASK].mean(), abs=1e-6)
    assert metrics["loss"] == pytest.approx(0.5 * metrics["kl"], abs=1e-6)
    expected = gradient(-0.1 * MASK / 9 * 0.5 * (1 - np.exp(-d)), BASE)
    np.testing.assert_allclose(change, expected, atol=1e-6)
    _, later = update(batch, loss=loss_of(beta=0.5), learning_rate=0.1, steps=3)
    assert later["kl"] < metrics["kl"]


def test_a_loss_without_kl_logs_it_where_there_is_a_reference():
    reference = np.where(MASK, LOGPROBS - 2 * NOISE, np.nan)
    plain, metrics = update(batch_of(), loss=loss_of("dapo"))
    assert "kl" not in metrics
    change, metrics = update(batch_of(ref=reference), loss=loss_of("dapo"))
    d = 2 * NOISE
    assert metrics["kl"] == pytest.approx((np.exp(-d) + d - 1)[MASK].mean(), abs=1e-6)
    np.testing.assert_array_equal(change, plain)


def test_logprobs_of_a_whole_rollout_come_in_pieces():
    tokens, params = batch_of().tokens, {"table": floats(BASE)}
    trainable = {"table": jnp.zeros((VOCAB, VOCAB))}
    for micro in (1, 2, ROWS):
        got = make_logprobs(table_logprobs, micro_batch_size=micro)(
            params, trainable, tokens, jax.random.key(0), jnp.float32(0.0)
        )
        np.testing.assert_allclose(got, LOGPROBS, atol=1e-6)


def test_another_sigma_is_not_another_program():
    traces = []

    def counted(*arguments):
        traces.append(1)
        return table_logprobs(*arguments)

    optimizer = optax.adam(0.1)
    trainable = {"table": jnp.zeros((VOCAB, VOCAB))}
    state = TrainState(
        step=jnp.int32(0),
        trainable=trainable,
        opt_state=optimizer.init(trainable),
        key=jax.random.key(0),
    )
    update_step = make_update_step(counted, loss_of(), optimizer, micro_batch_size=2)
    for step in range(4):
        state, _ = update_step(
            state, {"table": floats(BASE)}, batch_of(), state.key, jnp.float32(0.1 * step)
        )
        state = state.replace(step=state.step + 1)
        if step == 0:
            first = len(traces)
    assert len(traces) == first
    assert update_step._cache_size() == 1
