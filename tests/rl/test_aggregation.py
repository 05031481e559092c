import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rl.aggregation import AGGREGATIONS, token_weights
from qerl_jax.rl.masking import masked_sum

# Token losses [1] and [2, 2, 2, 2] with a limit of 8 tokens, by hand:
# (1 + 2) / 2, 9 / 5 and 9 / (2 * 8).
GOLDEN = {"sequence_mean": 1.5, "token_mean": 1.8, "fixed_length_mean": 0.5625}
LOSSES = jnp.array([[1.0, jnp.nan, jnp.nan, jnp.nan], [2.0, 2.0, 2.0, 2.0]])
MASK = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])


def ragged(batch: int = 8, completion: int = 6) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    lengths = np.array([1, 6, 2, 0, 5, 3, 6, 4])[:batch]
    mask = np.arange(completion)[None, :] < lengths[:, None]
    return jnp.asarray(rng.normal(size=mask.shape), jnp.float32), jnp.asarray(mask, jnp.float32)


def loss_of(losses, mask, aggregation, limit=8):
    weights = token_weights(mask, aggregation=aggregation, max_completion_tokens=limit)
    return masked_sum(losses, weights)


def test_the_table_is_the_golden_table():
    assert set(AGGREGATIONS) == set(GOLDEN)


@pytest.mark.parametrize("aggregation", sorted(GOLDEN))
def test_golden_values(aggregation):
    np.testing.assert_allclose(loss_of(LOSSES, MASK, aggregation), GOLDEN[aggregation], rtol=1e-6)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_against_float64_oracle(aggregation):
    losses, mask = (np.asarray(x, np.float64) for x in ragged())
    rows = [row[kept > 0] for row, kept in zip(losses, mask, strict=True)]
    expected = {
        "token_mean": np.concatenate(rows).mean(),
        "sequence_mean": sum(row.mean() for row in rows if row.size) / len(rows),
        "fixed_length_mean": np.concatenate(rows).sum() / (len(rows) * 11),
    }[aggregation]
    np.testing.assert_allclose(loss_of(*ragged(), aggregation, limit=11), expected, rtol=1e-5)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_micro_batches_sum_to_the_whole(aggregation, size):
    losses, mask = ragged()
    weights = token_weights(mask, aggregation=aggregation, max_completion_tokens=6)
    parts = [
        masked_sum(losses[i : i + size], weights[i : i + size]) for i in range(0, len(losses), size)
    ]
    np.testing.assert_allclose(sum(parts), loss_of(losses, mask, aggregation, 6), rtol=1e-6)


def test_token_mean_does_not_shrink_with_the_batch():
    losses, mask = jnp.tile(LOSSES, (4, 1)), jnp.tile(MASK, (4, 1))
    np.testing.assert_allclose(loss_of(losses, mask, "token_mean"), 1.8, rtol=1e-6)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_padding_columns_change_nothing(aggregation):
    losses = jnp.pad(LOSSES, ((0, 0), (0, 3)), constant_values=jnp.inf)
    mask = jnp.pad(MASK, ((0, 0), (0, 3)))
    np.testing.assert_allclose(loss_of(losses, mask, aggregation), GOLDEN[aggregation], rtol=1e-6)


def test_an_empty_row_counts_as_a_row_but_not_as_tokens():
    losses = jnp.concatenate([LOSSES, jnp.full((1, 4), jnp.nan)])
    mask = jnp.concatenate([MASK, jnp.zeros((1, 4))])
    assert jnp.isclose(loss_of(losses, mask, "token_mean"), 1.8)
    assert jnp.isclose(loss_of(losses, mask, "sequence_mean"), 1.0)
    assert jnp.isclose(loss_of(losses, mask, "fixed_length_mean"), 0.375)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_all_rows_empty_gives_zero(aggregation):
    losses = jnp.full((2, 4), jnp.nan)
    value, gradient = jax.value_and_grad(loss_of)(losses, jnp.zeros((2, 4)), aggregation)
    assert value == 0.0
    np.testing.assert_array_equal(gradient, np.zeros((2, 4)))


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r'loss\.aggregation: "mean" is not one of fixed_length'):
        loss_of(LOSSES, MASK, "mean")
