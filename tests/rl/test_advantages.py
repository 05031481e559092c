import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rl.advantages import ADVANTAGES, informative_groups

NEEDS_PAIRS = ("group_bessel", "leave_one_out")

# Values by hand for rewards [1, 0, 0, 0]: mean 1/4, squared deviations summing to 3/4, hence a
# deviation of 1/2 over 3 and sqrt(3)/4 over 4.
GOLDEN = {
    "group_bessel": (1.5, -0.5),
    "group_population": (3**0.5, -(3**-0.5)),
    "group_mean_only": (0.75, -0.25),
    "leave_one_out": (1.0, -1.0 / 3.0),
}

rewards_lists = st.lists(
    st.lists(st.floats(-4, 4, width=32), min_size=4, max_size=4), min_size=1, max_size=3
)


def oracle(name: str, rewards: np.ndarray, eps: float) -> np.ndarray:
    """Textbook formulas in float64, group by group."""
    result = np.zeros(rewards.shape)
    for row, out in zip(rewards.astype(np.float64), result, strict=True):
        for i, reward in enumerate(row):
            if name == "leave_one_out":
                out[i] = reward - np.delete(row, i).mean()
            elif name == "group_mean_only":
                out[i] = reward - row.mean()
            else:
                ddof = 1 if name == "group_bessel" else 0
                out[i] = (reward - row.mean()) / (row.std(ddof=ddof) + eps)
    return result


def test_the_table_is_the_golden_table():
    assert set(ADVANTAGES) == set(GOLDEN)


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_values(name):
    advantages = ADVANTAGES[name](jnp.array([[1.0, 0.0, 0.0, 0.0]]), eps=0.0)
    first, rest = GOLDEN[name]
    np.testing.assert_allclose(advantages, [[first, rest, rest, rest]], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("eps", [1e-6, 1e-4, 1e-2])
def test_against_float64_oracle(name, eps):
    rewards = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    rewards[1] = [1, 0, 0, 1, 0, 0, 0, 0]
    advantages = ADVANTAGES[name](jnp.asarray(rewards), eps=eps)
    np.testing.assert_allclose(advantages, oracle(name, rewards, eps), rtol=2e-5, atol=1e-6)


def test_eps_is_added_to_the_deviation():
    rewards = jnp.array([[1.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(ADVANTAGES["group_bessel"](rewards, eps=0.5)[0, 0], 0.75, rtol=1e-6)


def test_default_eps_is_that_of_trl():
    rewards = jnp.array([[1e-4, 0.0]])  # deviation 7.07e-5
    np.testing.assert_allclose(
        ADVANTAGES["group_bessel"](rewards)[0, 0], 5e-5 / (7.0711e-5 + 1e-4), rtol=1e-4
    )


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("group", [2, 6, 7])
def test_equal_rewards_give_exactly_zero(name, group):
    # A two-pass float32 mean of six 0.9 gives a deviation of 6.5e-8 and advantages of -0.056.
    column = jnp.array([[0.9], [0.1], [-0.3], [1e4 / 3], [0.0]], jnp.float32)
    rewards = jnp.tile(column, (1, group))
    for eps in (0.0, 1e-6):
        fn = functools.partial(ADVANTAGES[name], eps=eps)
        np.testing.assert_array_equal(fn(rewards), np.zeros((5, group)))
        np.testing.assert_array_equal(jax.jit(fn)(rewards), np.zeros((5, group)))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_group_of_one_is_refused_or_zero(name):
    rewards = jnp.ones((2, 1))
    if name in NEEDS_PAIRS:
        with pytest.raises(ValueError, match=r"rollout\.num_generations: 1 is below 2"):
            ADVANTAGES[name](rewards, eps=1e-4)
    else:
        np.testing.assert_array_equal(ADVANTAGES[name](rewards, eps=1e-4), np.zeros((2, 1)))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_nan_reward_is_not_hidden(name):
    advantages = ADVANTAGES[name](jnp.array([[1.0, jnp.nan], [1.0, 0.0]]), eps=1e-4)
    assert jnp.isnan(advantages[0]).all()
    assert jnp.isfinite(advantages[1]).all()


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(rewards=rewards_lists, name=st.sampled_from(sorted(ADVANTAGES)))
def test_advantages_of_a_group_sum_to_zero(rewards, name):
    advantages = np.asarray(ADVANTAGES[name](jnp.array(rewards, jnp.float32), eps=1e-4))
    scale = 1.0 + np.abs(advantages).max()
    np.testing.assert_allclose(advantages.sum(axis=1), 0.0, atol=1e-4 * scale)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_groups_do_not_mix(name):
    rewards = jnp.array([[1.0, 0.0, 0.5], [9.0, -3.0, 2.0]])
    together = ADVANTAGES[name](rewards, eps=1e-4)
    alone = jnp.concatenate([ADVANTAGES[name](row[None], eps=1e-4) for row in rewards])
    np.testing.assert_array_equal(together, alone)


def test_informative_groups():
    rewards = jnp.array([[0.0] + [0.95] * 7, [0.9] * 8, [0.0] * 8, [1.0] * 7 + [0.0]])
    np.testing.assert_array_equal(informative_groups(rewards), [True, False, False, True])
