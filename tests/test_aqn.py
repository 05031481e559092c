import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.aqn import (
    AQN_SCHEDULES,
    matched_norms,
    max_relative_noise,
    perturb_norm_scales,
)

BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm")
CLEAN_FIRST = ("algorithm1", "cosine", "linear", "logarithmic", "released")

# Sigma of stages 0..9 for 10 stages. Computed from the formulas of the paper and of the released
# code in float64, to three digits.
STAGES = {
    ("released", 1e-2, 1e-4): (
        0, 1.00e-2, 5.62e-3, 3.16e-3, 1.78e-3, 1.00e-3, 5.62e-4, 3.16e-4, 1.78e-4, 1.00e-4,
    ),
    ("released", 1e-2, 5e-4): (
        0, 1.00e-2, 6.88e-3, 4.73e-3, 3.25e-3, 2.24e-3, 1.54e-3, 1.06e-3, 7.27e-4, 5.00e-4,
    ),
    ("released", 5e-2, 5e-4): (
        0, 5.00e-2, 2.81e-2, 1.58e-2, 8.89e-3, 5.00e-3, 2.81e-3, 1.58e-3, 8.89e-4, 5.00e-4,
    ),
    ("algorithm1", 1e-2, 1e-4): (
        0, 1.00e-2, 5.99e-3, 3.59e-3, 2.15e-3, 1.29e-3, 7.74e-4, 4.64e-4, 2.78e-4, 1.67e-4,
    ),
    ("paper_eq8", 1e-2, 1e-4): (
        1.00e-2, 5.99e-3, 3.59e-3, 2.15e-3, 1.29e-3, 7.74e-4, 4.64e-4, 2.78e-4, 1.67e-4, 1.00e-4,
    ),
}  # fmt: skip


def make_schedule(name, *, stages=10, steps=100, start=1e-2, end=1e-4):
    return AQN_SCHEDULES[name](
        sigma_start=start, sigma_end=end, num_stages=stages, total_steps=steps
    )


@pytest.mark.parametrize(("name", "start", "end"), sorted(STAGES))
def test_golden_stages(name, start, end):
    schedule = make_schedule(name, start=start, end=end)
    expected = np.repeat(STAGES[name, start, end], 10)
    np.testing.assert_allclose([schedule(step) for step in range(100)], expected, rtol=5e-3)


def test_released_golden_steps():
    schedule = make_schedule("released")
    assert [schedule(step) for step in (0, 9)] == [0.0, 0.0]
    assert [schedule(step) for step in (10, 19)] == [1e-2, 1e-2]
    assert schedule(20) == pytest.approx(5.62e-3, rel=1e-3)
    assert schedule(50) == pytest.approx(1e-3, rel=1e-9)
    assert [schedule(step) for step in (90, 99)] == [1e-4, 1e-4]


def test_released_is_the_released_code_one_step_later():
    """Its counter is 1 at the first rollout: floor(step / (M / K)) with step from 1."""
    steps, stages = 60, 10
    levels = [1e-2 * (1e-4 / 1e-2) ** (j / (stages - 2)) for j in range(stages - 1)]
    schedule = make_schedule("released", steps=steps)
    for step in range(1, steps):
        index = step // (steps // stages)
        original = 0.0 if index == 0 else levels[min(index - 1, stages - 2)]
        assert schedule(step) == pytest.approx(original, rel=1e-9)


@pytest.mark.parametrize("name", sorted(AQN_SCHEDULES))
def test_every_shape_is_defined_bounded_and_never_rises(name):
    for stages, steps in itertools.product((1, 2, 3, 7, 100, 1000), (1, 2, 5, 100)):
        schedule = make_schedule(name, stages=stages, steps=steps)
        sigmas = [schedule(step) for step in range(steps + 3)]
        assert all(type(sigma) is float and math.isfinite(sigma) for sigma in sigmas)
        noisy = [sigma for sigma in sigmas if sigma != 0.0]
        assert sigmas == [0.0] * (len(sigmas) - len(noisy)) + noisy  # clean steps come first
        assert noisy == sorted(noisy, reverse=True)
        assert all(1e-4 * (1 - 1e-9) <= sigma <= 1e-2 * (1 + 1e-9) for sigma in noisy)


@pytest.mark.parametrize("name", sorted(AQN_SCHEDULES))
def test_past_the_end_stays_at_the_last_value(name):
    schedule = make_schedule(name)
    assert schedule(100) == schedule(99) == schedule(10**9)


@pytest.mark.parametrize("name", CLEAN_FIRST)
def test_first_stage_is_clean_and_the_next_starts_at_sigma_start(name):
    schedule = make_schedule(name)
    assert [schedule(step) for step in range(10)] == [0.0] * 10
    assert schedule(10) == 1e-2


@pytest.mark.parametrize("name", sorted(set(AQN_SCHEDULES) - {"algorithm1", "constant"}))
def test_last_step_has_sigma_end(name):
    assert make_schedule(name)(99) == 1e-4


@pytest.mark.parametrize("name", CLEAN_FIRST)
def test_one_stage_is_always_clean(name):
    schedule = make_schedule(name, stages=1)
    assert [schedule(step) for step in (0, 50, 99, 100)] == [0.0] * 4


def test_one_and_two_stages_of_the_geometric_schedules():
    assert {make_schedule("paper_eq8", stages=1)(step) for step in (0, 99)} == {1e-4}
    ends = {"released": (0.0, 1e-4), "algorithm1": (0.0, 1e-2), "paper_eq8": (1e-2, 1e-4)}
    for name, expected in ends.items():
        schedule = make_schedule(name, stages=2)
        assert tuple(schedule(step) for step in (0, 49)) == (expected[0],) * 2
        assert tuple(schedule(step) for step in (50, 99)) == (expected[1],) * 2


def test_values_of_the_continuous_schedules():
    # 103 steps in 10 stages: stage 0 is steps 0-10, so u = 0 at step 11, and u = 1 at step 102.
    middle = {"linear": 45 / 91, "logarithmic": math.log10(1 + 9 * 45 / 91)}
    middle["cosine"] = (1 - math.cos(math.pi * 45 / 91)) / 2
    for name, weight in middle.items():
        schedule = make_schedule(name, steps=103)
        assert schedule(10) == 0.0
        assert schedule(11) == 1e-2
        assert schedule(56) == pytest.approx(1e-2 + (1e-4 - 1e-2) * weight, rel=1e-9)
        assert schedule(102) == 1e-4


def test_constant_is_constant():
    schedule = make_schedule("constant")
    assert {schedule(step) for step in range(101)} == {1e-2}


@pytest.mark.parametrize("name", sorted(AQN_SCHEDULES))
def test_zero_sigmas_are_defined(name):
    assert make_schedule(name, start=0.0, end=0.0)(50) == 0.0
    assert make_schedule(name, end=0.0)(10) >= 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 0}, r"aqn\.num_stages: 0 is below 1"),
        ({"steps": 0}, r"total_steps: 0 is below 1"),
        ({"start": -1e-2}, r"aqn\.sigma_start: -0\.01 is not"),
        ({"end": math.nan}, r"aqn\.sigma_end: nan is not"),
    ],
)
@pytest.mark.parametrize("name", sorted(AQN_SCHEDULES))
def test_bad_schedules_are_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(name, **arguments)


def make_params(dtype=jnp.float32, layers=3, embed=256):
    """Scales near 1, as in trained models, and weights that noise must not reach."""
    scales = iter(np.random.default_rng(0).normal(1.0, 0.2, (5, layers, embed)))
    return {
        "embed_tokens": jnp.ones((8, embed), jnp.bfloat16),
        "layers": {
            "input_layernorm": jnp.asarray(next(scales), dtype),
            "post_attention_layernorm": jnp.asarray(next(scales), dtype),
            "q_norm": jnp.asarray(next(scales), dtype),
            "k_norm": jnp.asarray(next(scales), dtype),
            "q_proj": {"weight": jnp.ones((layers, 4, embed)), "bias": jnp.zeros((layers, 4))},
        },
        "norm": jnp.asarray(next(scales)[0], dtype),
    }


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_only_the_targets_change_and_the_base_is_untouched(key):
    params = make_params()
    before = bits(params)
    noisy = perturb_norm_scales(params, key, 1e-2, targets=BLOCK_NORMS)
    assert bits(params) == before
    assert jax.tree.structure(noisy) == jax.tree.structure(params)
    for name in BLOCK_NORMS:
        assert (noisy["layers"][name] != params["layers"][name]).mean() > 0.99
        noisy["layers"][name] = params["layers"][name]
    assert bits(noisy) == before


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sigma_zero_returns_the_same_bits(key, dtype):
    params = make_params(dtype)
    params["norm"] = params["norm"].at[:16].set(-0.0)  # adding +0.0 would lose their sign
    targets = (*BLOCK_NORMS, "norm")
    for sigma in (0.0, jnp.float32(0.0)):
        noisy = perturb_norm_scales(params, key, sigma, targets=targets)
        for name in matched_norms(params, targets):
            path = name.split("/")
            clean, same = params, noisy
            for part in path:
                clean, same = clean[part], same[part]
            assert same.dtype == jnp.float32
            assert bits(same) == bits(clean.astype(jnp.float32))


def test_noise_is_standard_normal_times_sigma(key):
    params = make_params(layers=20, embed=1000)
    noisy = perturb_norm_scales(params, key, 0.5, targets=("input_layernorm",))
    clean = params["layers"]["input_layernorm"]
    noise = np.asarray((noisy["layers"]["input_layernorm"] - clean) / 0.5).ravel()
    # 20,000 samples: the standard errors are 0.007, 0.005 and 0.003.
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1.0) < 0.02
    assert abs((np.abs(noise) < 1).mean() - 0.6827) < 0.014


def test_norms_and_layers_are_independent(key):
    params = make_params(layers=4, embed=4000)
    targets = (*BLOCK_NORMS, "q_norm", "k_norm", "norm")
    noisy = perturb_norm_scales(params, key, 1.0, targets=targets)
    rows = [noisy["norm"] - params["norm"]]
    for name in targets[:-1]:
        rows.extend(noisy["layers"][name] - params["layers"][name])
    correlation = np.corrcoef(np.stack(rows)) - np.eye(17)
    assert np.abs(correlation).max() < 0.08  # 5 standard errors of 4,000 channels


def test_noise_depends_on_key_and_step_and_on_nothing_else(key):
    params = make_params()

    def scales(step, targets):
        noisy = perturb_norm_scales(params, jax.random.fold_in(key, step), 1e-2, targets=targets)
        return np.asarray(noisy["layers"]["input_layernorm"])

    np.testing.assert_array_equal(scales(3, BLOCK_NORMS), scales(3, BLOCK_NORMS))
    np.testing.assert_array_equal(scales(3, BLOCK_NORMS), scales(3, ("norm", "input_layernorm")))
    assert (scales(3, BLOCK_NORMS) != scales(4, BLOCK_NORMS)).mean() > 0.99


def test_golden_noise(key):
    """Values of this code with jax 0.10.2 and 0.11.2.

    If they change, resumed runs draw other noise. The salted hash() of a name would change them
    from process to process.
    """
    params = {"norm": jnp.zeros(4), "layers": {"input_layernorm": jnp.zeros((2, 2))}}
    noisy = perturb_norm_scales(params, key, 1.0, targets=("norm", "input_layernorm"))
    np.testing.assert_allclose(
        noisy["norm"], [-0.3566749, 1.6308006, 0.3066921, -0.0838300], rtol=1e-5
    )
    np.testing.assert_allclose(
        noisy["layers"]["input_layernorm"],
        [[0.5504199, -1.4964459], [1.1930404, 1.9292877]],
        rtol=1e-5,
    )


def test_changing_sigma_does_not_retrace(key):
    traces = []

    @jax.jit
    def noisy_norm(params, key, sigma):
        traces.append(sigma)
        return perturb_norm_scales(params, key, sigma, targets=("norm",))["norm"]

    params = make_params()
    schedule = make_schedule("released")
    results = [noisy_norm(params, key, schedule(step)) for step in range(0, 100, 25)]
    assert len(traces) == 1
    np.testing.assert_array_equal(results[0], params["norm"])
    assert (results[1] != params["norm"]).mean() > 0.99


def test_smallest_sigma_of_the_schedule_still_acts(key):
    # In bfloat16 a sigma of 1e-4 changes no scale near 1: the step there is 2^-8.
    params = make_params()
    noisy = perturb_norm_scales(params, key, 1e-4, targets=("input_layernorm",))
    changed = noisy["layers"]["input_layernorm"] != params["layers"]["input_layernorm"]
    assert changed.mean() > 0.99
    assert (
        perturb_norm_scales(make_params(jnp.bfloat16), key, 1e-4, targets=("norm",))["norm"].dtype
        == jnp.float32
    )


def test_matched_norms_takes_abstract_params():
    params = jax.eval_shape(make_params)
    assert matched_norms(params, ("norm", "q_norm")) == ("layers/q_norm", "norm")


@pytest.mark.parametrize("targets", [("RMSNorm",), ("input_layernorm", "q_proj"), ("bias",), ()])
def test_a_target_without_a_norm_is_refused(key, targets):
    with pytest.raises(ValueError, match=r"aqn\.targets: .* has input_layernorm, k_norm, norm,"):
        perturb_norm_scales(make_params(), key, 1e-2, targets=targets)


def test_max_relative_noise(key):
    params = {"norm": jnp.array([1.0, -0.5, 0.0]), "layers": {"q_norm": jnp.ones((2, 3))}}
    noisy = {"norm": jnp.array([1.1, -0.25, 0.0]), "layers": {"q_norm": jnp.ones((2, 3))}}
    np.testing.assert_allclose(max_relative_noise(params, noisy), 0.5, rtol=1e-6)
    assert max_relative_noise(params, params) == 0.0
    assert max_relative_noise(params, noisy | {"norm": jnp.array([1.0, -0.5, 1e-3])}) == jnp.inf
