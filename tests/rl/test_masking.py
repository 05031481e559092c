import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.rl.masking import masked_sum


def test_values():
    x, mask = jnp.array([[1.0, 2.0, 5.0]]), jnp.array([[1.0, 1.0, 0.0]])
    assert masked_sum(x, mask) == 3.0


def test_real_weights():
    x, weights = jnp.array([2.0, 4.0, 8.0]), jnp.array([0.25, 0.5, 0.0])
    assert masked_sum(x, weights) == 2.5


def test_hidden_positions_have_no_value_and_no_gradient():
    x, mask = jnp.array([1.0, jnp.nan, jnp.inf]), jnp.array([1.0, 0.0, 0.0])
    value, gradient = jax.value_and_grad(masked_sum)(x, mask)
    assert value == 1.0
    np.testing.assert_array_equal(gradient, [1.0, 0.0, 0.0])


def test_visible_nan_stays_visible():
    assert jnp.isnan(masked_sum(jnp.array([jnp.nan, 1.0]), jnp.ones(2)))


def test_empty_mask_gives_zero_and_zero_gradient():
    value, gradient = jax.value_and_grad(masked_sum)(jnp.ones((2, 3)), jnp.zeros((2, 3)))
    assert value == 0.0
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))
