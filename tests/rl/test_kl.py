import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rl.kl import KL_ESTIMATORS

# Policy and reference over three tokens; values and gradients computed in float64 with numpy:
# the true KL is sum p log(p / ref), and its gradient on the logits p * (log(p / ref) - KL).
POLICY, REFERENCE = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
TRUE_KL = 0.08512
MEANS = {"k1": 0.08512, "k2": 0.08009, "k3": 0.08512}
GRADIENTS = {
    "k1": (0.0, 0.0, 0.0),
    "k2": (0.1759, -0.0981, -0.0778),
    "k3": (0.2, -0.1, -0.1),
}


def expected_estimate(logits, name, reference):
    """E over tokens sampled from the policy; the sampling itself carries no gradient."""
    logprobs = jax.nn.log_softmax(logits)
    probabilities = jax.lax.stop_gradient(jnp.exp(logprobs))
    return jnp.sum(probabilities * KL_ESTIMATORS[name](logprobs, jnp.log(reference)))


def test_the_table_is_the_golden_table():
    assert set(KL_ESTIMATORS) == set(MEANS)


@pytest.mark.parametrize("name", sorted(MEANS))
def test_mean_and_gradient(name):
    logits, reference = jnp.log(jnp.array(POLICY)), jnp.array(REFERENCE)
    value, gradient = jax.value_and_grad(expected_estimate)(logits, name, reference)
    np.testing.assert_allclose(value, MEANS[name], atol=1e-5)
    np.testing.assert_allclose(gradient, GRADIENTS[name], atol=1e-4)


def test_k2_has_the_gradient_of_the_reverse_kl():
    log_ratio = np.log(POLICY / REFERENCE)
    reverse_kl = np.sum(POLICY * log_ratio)
    np.testing.assert_allclose(reverse_kl, TRUE_KL, atol=1e-5)
    np.testing.assert_allclose(GRADIENTS["k2"], POLICY * (log_ratio - reverse_kl), atol=1e-4)


@pytest.mark.parametrize("name", sorted(MEANS))
def test_equal_policies_give_zero(name):
    logprobs = jnp.log(jnp.array(POLICY))
    np.testing.assert_array_equal(KL_ESTIMATORS[name](logprobs, logprobs), np.zeros(3))


@pytest.mark.parametrize("gap", [-300.0, 300.0])
def test_k3_is_finite_with_a_finite_gradient_on_far_policies(gap):
    value, gradient = jax.value_and_grad(KL_ESTIMATORS["k3"])(jnp.float32(gap), jnp.float32(0.0))
    assert jnp.isfinite(value)
    assert value > 0
    assert jnp.isfinite(gradient)
