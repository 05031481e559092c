"""Scores of given tokens against plain log-softmax over whole logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.models import forward
from qerl_jax.models.head import head_logits, head_weight
from qerl_jax.models.score import score_tokens
from qerl_jax.testing import tiny_adapter, tiny_config, tiny_params

WIDTH = 11


@pytest.fixture(scope="module")
def model():
    """Return (config, parameters, adapter)."""
    config = tiny_config()
    params = tiny_params(jax.random.key(1), config, quantize=False)
    return config, params, tiny_adapter(jax.random.key(2), params)


@pytest.fixture
def rows():
    """Return ids of two rows, of 11 and 6 tokens, padded on the right, and their mask."""
    ids = np.random.default_rng(0).integers(0, 64, (2, WIDTH))
    return jnp.asarray(ids), jnp.asarray(np.arange(WIDTH)[None, :] < np.array([[WIDTH], [6]]))


def logits_of(model, rows, *, adapted=True):
    config, params, adapter = model
    hidden, _ = forward(params, adapter if adapted else None, *rows, config=config)
    flat = head_logits(hidden.reshape(-1, config.embed), head_weight(params))
    return np.asarray(flat).reshape(2, WIDTH, config.vocab_size)


@pytest.mark.parametrize(("chunk", "temperature"), [(1, 0.7), (8, 0.7), (1000, 1.0)])
def test_values(model, rows, chunk, temperature):
    config, params, adapter = model
    got = score_tokens(
        params,
        adapter,
        *rows,
        config=dataclasses.replace(config, logits_chunk=chunk),
        temperature=temperature,
        top_k=5,
    )
    logits, (ids, valid) = logits_of(model, rows), rows
    every = np.asarray(jax.nn.log_softmax(logits / temperature, axis=-1))
    expected = np.take_along_axis(every[:, :-1], np.asarray(ids)[:, 1:, None], axis=-1)[..., 0]
    known = np.asarray(valid)[:, 1:]
    np.testing.assert_allclose(got.next_logprobs[:, :-1][known], expected[known], atol=1e-5)
    order = np.argsort(-logits, axis=-1)[..., :5]
    assert np.array_equal(np.asarray(got.top_ids)[:, :6], order[:, :6])
    # The largest logits are the model's own, whatever the temperature.
    largest = np.take_along_axis(logits, order, axis=-1)
    np.testing.assert_allclose(got.top_logits[:, :6], largest[:, :6], atol=1e-5)


def test_padding_and_what_stands_in_it_do_not_matter(model, rows):
    config, params, adapter = model
    ids, valid = rows
    settings = {"config": config, "temperature": 1.0, "top_k": 3}
    padded = score_tokens(params, adapter, ids, valid, **settings)
    alone = score_tokens(params, adapter, ids[1:, :6], valid[1:, :6], **settings)
    np.testing.assert_allclose(padded.next_logprobs[1, :5], alone.next_logprobs[0, :5], atol=1e-5)
    np.testing.assert_allclose(padded.top_logits[1, :6], alone.top_logits[0], atol=1e-5)
    other = score_tokens(params, adapter, jnp.where(valid, ids, 63), valid, **settings)
    assert np.array_equal(padded.next_logprobs[1, :5], other.next_logprobs[1, :5])


def test_an_adapter_changes_the_scores_and_a_zero_b_does_not(model, rows):
    config, params, adapter = model
    zero = jax.tree.map(jnp.zeros_like, adapter)
    settings = {"config": config, "temperature": 1.0, "top_k": 1}
    none, with_zero, moved = (
        score_tokens(params, a, *rows, **settings).top_logits for a in (None, zero, adapter)
    )
    assert np.array_equal(none, with_zero)
    assert np.abs(none - moved).max() > 0.01


def test_temperatures_share_a_program(model, rows):
    config, params, adapter = model
    before = score_tokens._cache_size()
    for temperature in (0.5, 1.0, 2.0):
        score_tokens(params, adapter, *rows, config=config, temperature=temperature, top_k=2)
    assert score_tokens._cache_size() == before + 1
