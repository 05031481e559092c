"""Filters against hand-worked distributions; draws against their own probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.sampling import filter_logits, sample_token

PROBS = jnp.array([[0.5, 0.25, 0.15, 0.07, 0.03]])
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.49}, [0]),  # the largest token alone has the mass
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.9}, [0, 1, 2]),
        ({"min_p": 0.2}, [0, 1, 2]),  # at least 0.1
        ({"min_p": 0.999}, [0]),
        # top-p acts on what top-k kept: 0.5/0.75 < 0.7 <= 1
        ({"top_k": 2, "top_p": 0.7}, [0, 1]),
        ({"top_k": 2, "top_p": 0.6}, [0]),
    ],
)
def test_filters_keep_the_right_tokens(settings, kept):
    filtered = filter_logits(jnp.log(PROBS), **OFF | settings)
    assert np.flatnonzero(np.isfinite(filtered[0])).tolist() == kept


def test_unordered_logits_are_filtered_alike():
    order = jnp.array([3, 0, 4, 2, 1])
    filtered = filter_logits(jnp.log(PROBS)[:, order], top_k=3, top_p=0.8, min_p=0.0)
    assert set(np.asarray(order)[np.isfinite(filtered[0])].tolist()) == {0, 1}


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, [1, 2]), (0.6, [0, 1, 2]), (0.1, [1])])
def test_top_p_keeps_no_more_of_tied_tokens_than_the_mass_needs(top_p, kept):
    logits = jnp.log(jnp.array([[0.2, 0.25, 0.25, 0.1, 0.1, 0.1]]))
    filtered = filter_logits(logits, **OFF | {"top_p": top_p})
    assert np.flatnonzero(np.isfinite(filtered[0])).tolist() == kept
    uniform = filter_logits(jnp.zeros((2, 10)), **OFF | {"top_p": 0.35})
    assert np.isfinite(uniform).sum(axis=-1).tolist() == [4, 4]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_draws_follow_the_reported_log_probabilities(key, temperature):
    keys = jax.random.split(key, 20_000)
    logits = jnp.broadcast_to(jnp.log(PROBS), (20_000, 5))
    tokens, logprobs = sample_token(keys, logits, temperature=temperature, top_k=4)
    expected = jax.nn.softmax(jnp.log(PROBS[0, :4]) / temperature)
    counts = np.bincount(tokens, minlength=5) / 20_000
    np.testing.assert_allclose(counts[:4], expected, atol=0.015)
    assert counts[4] == 0
    np.testing.assert_allclose(jnp.exp(logprobs), expected[tokens], rtol=1e-5)


def test_greedy_reports_the_model_at_temperature_one(key):
    tokens, logprobs = sample_token(jax.random.split(key, 1), jnp.log(PROBS), temperature=0.0)
    assert tokens.tolist() == [0]
    np.testing.assert_allclose(logprobs, jnp.log(0.5), rtol=1e-6)


def test_the_noise_reaches_rare_tokens(monkeypatch):
    """What gives them is the mode of the noise; the next test counts them."""
    modes, gumbel = [], jax.random.gumbel

    def spy(*arguments, mode=None, **settings):
        modes.append(mode)
        return gumbel(*arguments, mode=mode, **settings)

    monkeypatch.setattr(jax.random, "gumbel", spy)
    keys = jax.random.split(jax.random.key(0), 2)
    sample_token(keys, jnp.zeros((2, 8)), temperature=1.0)
    assert modes == ["high"]


@pytest.mark.gpu
def test_tokens_more_than_20_nats_below_the_best_are_drawn(key):
    """5e10 noise values, too many for a CPU; in the quick mode none of the tail is ever drawn."""
    tail, rows, rounds = 100_000, 4_096, 128
    logits = jnp.full((rows, 1 + tail), -21.5).at[:, 0].set(0.0)

    def count(total, round_key):
        tokens, _ = sample_token(jax.random.split(round_key, rows), logits, temperature=1.0)
        return total + jnp.sum(tokens != 0), None

    drawn, _ = jax.lax.scan(count, 0, jax.random.split(key, rounds))
    expected = rows * rounds * tail * np.exp(-21.5)  # 24; Poisson, so 5 to 60 is certain
    assert 5 < int(drawn) < 60, f"{drawn} of the tail drawn, {expected:.0f} expected"
