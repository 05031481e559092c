"""Training steps of a tiny decoder: what changes, what must not, and what is recorded."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.aqn import AQN_SCHEDULES
from qerl_jax.config import LossConfig
from qerl_jax.config_io import load_config
from qerl_jax.data import DataState
from qerl_jax.experiment import build_experiment
from qerl_jax.lora import Trainable
from qerl_jax.metrics import read_jsonl
from qerl_jax.policy import policy_params, step_keys
from qerl_jax.sampling import generate
from qerl_jax.state import init_state
from qerl_jax.step import make_batch, sample, train_step
from qerl_jax.train import run_training
from qerl_jax.tree import flatten_arrays

STEPS = 4
# A second config with every option that adds to the update.
EVERYTHING = (
    "--lora.train_norms=true",
    "--aqn.apply_to=rollout",
    "--aqn.schedule=constant",
    "--aqn.sigma_start=0.3",
    "--loss.beta=0.1",
    "--loss.importance_cap=1.2",
    "--optimizer.num_iterations=2",
    "--optimizer.micro_batch_size=2",
    "--optimizer.learning_rate=0.05",
    "--optimizer.schedule=cosine",
    "--optimizer.warmup_steps=0",
    "--eval.correct=exact_number",
)
NOISE_KEY, SAMPLING_KEY = jax.random.key(11), jax.random.key(12)


def bits(tree):
    return {name: np.asarray(array).tobytes() for name, array in flatten_arrays(tree).items()}


def new_state(experiment):
    return init_state(experiment.config, experiment.parts.optimizer, experiment.params)


def train(experiment, steps=STEPS):
    """Return the last state, the records and the rollouts of some steps."""
    state, cursor, records, rollouts = new_state(experiment), DataState(), [], []
    for _ in range(steps):
        state, cursor, record, rollout = train_step(experiment, state, cursor)
        records.append(record)
        rollouts.append(rollout)
    return state, records, rollouts


@pytest.fixture(scope="module")
def experiment(tiny_home):
    return build_experiment(load_config(tiny_home / "config.yaml"))


@pytest.fixture(scope="module")
def trained(experiment):
    """Train; returns (bits of the base before, state, records, rollouts, programs traced)."""
    before = bits(experiment.params)
    generate.clear_cache()  # of the same program, traced by another test
    state, records, rollouts = train(experiment)
    programs = generate._cache_size(), experiment.update_step._cache_size()
    return before, state, records, rollouts, programs


@pytest.fixture(scope="module")
def everything(tiny_home):
    """Train with EVERYTHING; returns (experiment, bits before, records)."""
    experiment = build_experiment(load_config(tiny_home / "config.yaml", EVERYTHING))
    before = bits(experiment.params)
    _, records, _ = train(experiment)
    return experiment, before, records


def test_training_moves_the_adapter_and_not_a_bit_of_the_base(experiment, trained):
    before, state, *_ = trained
    assert bits(experiment.params) == before
    moved = bits(new_state(experiment).trainable)
    assert all(moved[name] != value for name, value in bits(state.trainable).items())


def test_trained_norms_leave_those_of_the_base_alone(everything):
    experiment, before, _ = everything
    assert bits(experiment.params) == before


def test_one_program_serves_every_step_and_sigma(trained):
    _, _, records, _, programs = trained
    assert len({record["sigma"] for record in records}) == STEPS
    assert programs == (1, 1)


def logprobs_at(experiment, state, sigma):
    rollout = sample(experiment, state, [0, 1], NOISE_KEY, SAMPLING_KEY, jnp.float32(sigma))
    return rollout.sampler_logprobs


def test_the_noise_of_a_step_is_gone_in_the_next(experiment):
    state = new_state(experiment)
    before = bits(experiment.params)
    clean = logprobs_at(experiment, state, 0.0)
    noisy = logprobs_at(experiment, state, 0.5)
    assert np.abs(noisy - clean).max() > 0.01
    np.testing.assert_array_equal(logprobs_at(experiment, state, 0.0), clean)
    np.testing.assert_array_equal(logprobs_at(experiment, state, 0.5), noisy)
    assert bits(experiment.params) == before


def test_noise_falls_on_the_named_norms_alone(experiment):
    trainable = new_state(experiment).trainable
    given = policy_params(
        experiment.params,
        trainable,
        NOISE_KEY,
        jnp.float32(0.1),
        noise_targets=("input_layernorm",),
    )
    before = bits(experiment.params)
    changed = {name for name, value in bits(given).items() if value != before[name]}
    assert changed == {"layers/input_layernorm"}


def test_a_new_adapter_changes_nothing_and_a_changed_one_the_sampler(experiment):
    state, sigma = new_state(experiment), jnp.float32(0.0)
    given = sample(experiment, state, [0, 1], NOISE_KEY, SAMPLING_KEY, sigma)
    mask, tokens = given.completion_mask, given.tokens
    # ref_logprobs is the base model without any adapter.
    base = experiment.ref_logprobs(experiment.params, state.trainable, tokens, NOISE_KEY, sigma)
    np.testing.assert_allclose(given.sampler_logprobs[mask], base[mask], atol=1e-5)
    pairs = {**state.trainable.adapter.pairs}
    pairs["o_proj"] = {"a": pairs["o_proj"]["a"], "b": pairs["o_proj"]["b"] + 0.2}
    adapter = state.trainable.adapter.replace(pairs=pairs)
    changed = state.replace(trainable=state.trainable.replace(adapter=adapter))
    moved = logprobs_at(experiment, changed, 0.0)
    assert np.abs(moved[:, 0] - given.sampler_logprobs[:, 0]).min() > 1e-4  # in every row


def test_sampler_and_trainer_are_one_policy(experiment, trained):
    """With noise, and with an adapter that has moved: the update sees the sampled log-probs."""
    _, state, records, _, _ = trained
    assert all(record["logprob_gap"] < 1e-5 for record in records)
    assert all(record["ratio"] == 1.0 for record in records)
    copy = jax.tree.map(jnp.copy, state)
    noisy = sample(experiment, copy, [0, 1], NOISE_KEY, SAMPLING_KEY, jnp.float32(0.5))
    tokens = (experiment.params, copy.trainable, noisy.tokens, NOISE_KEY)
    seen = experiment.old_logprobs(*tokens, jnp.float32(0.5))
    clean = experiment.old_logprobs(*tokens, jnp.float32(0.0))
    mask = noisy.completion_mask
    np.testing.assert_allclose(seen[mask], noisy.sampler_logprobs[mask], atol=1e-5)
    assert np.abs(clean - noisy.sampler_logprobs)[mask].max() > 0.01


RECORDED = {
    "step",
    "epoch",
    "sigma",
    "noise_max_relative",
    "learning_rate",
    "reward",
    "reward_std",
    "reward/tiny_rewards:sevens",
    "kept_groups",
    "groups",
    "length_mean",
    "length_max",
    "truncated",
    "loss",
    "loss_tokens",
    "grad_norm",
    "update_norm",
    "entropy",
    "logprob_gap",
    "ratio",
    "clipped_low",
    "clipped_high",
    "time/rollout",
    "time/batch",
    "time/update",
    "time/step",
    "time/tokens_per_second",
}


def test_the_record_of_a_step_is_complete(trained, everything):
    assert {frozenset(record) for record in trained[2]} == {frozenset(RECORDED)}
    more = {"kl", "importance_weight", "reward/exact_number"}
    assert {frozenset(record) for record in everything[2]} == {frozenset(RECORDED | more)}


def test_the_record_says_what_happened(trained):
    _, _, records, rollouts, _ = trained
    schedule = AQN_SCHEDULES["released"](
        sigma_start=1e-2, sigma_end=1e-4, num_stages=10, total_steps=STEPS
    )
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert [r["epoch"] for r in records] == [0, 0, 0, 1]  # 6 prompts, 2 a step
    assert [r["sigma"] for r in records] == [float(np.float32(schedule(t))) for t in range(STEPS)]
    assert [r["learning_rate"] for r in records] == pytest.approx([0.005, 0.01, 0.01, 0.01])
    noisy = [record["noise_max_relative"] > 0 for record in records]
    assert noisy == [record["sigma"] > 0 for record in records] == [False, True, True, True]
    for record, rollout in zip(records, rollouts, strict=True):
        sevens = np.array([text.count("7") / 4 for text in rollout.texts])
        np.testing.assert_allclose(rollout.rewards, sevens)
        spread = sevens.reshape(2, 4).max(axis=1) > sevens.reshape(2, 4).min(axis=1)
        assert record["reward"] == record["reward/tiny_rewards:sevens"] == sevens.mean()
        assert (record["kept_groups"], record["groups"]) == (spread.sum(), 2)
        lengths = rollout.completion_mask.sum(axis=1)
        assert (record["length_mean"], record["length_max"]) == (lengths.mean(), lengths.max())
        assert record["loss_tokens"] == lengths.sum()
        assert record["truncated"] == 1.0 - rollout.finished.mean()
        phases = sum(record[f"time/{name}"] for name in ("rollout", "batch", "update"))
        assert record["time/step"] == pytest.approx(phases)


def test_prompts_come_in_the_order_of_the_seed(experiment, trained):
    _, _, _, rollouts, _ = trained
    width = experiment.prompt_width
    seen = [
        tuple(rollout.prompt_ids[row][rollout.prompt_mask[row]])
        for rollout in rollouts[:3]
        for row in (0, 4)
    ]
    assert sorted(seen) == sorted(prompt.ids for prompt in experiment.train_prompts)
    assert all(rollout.prompt_ids.shape == (8, width) for rollout in rollouts)


def test_everything_on_does_what_each_option_says(everything):
    _, _, records = everything
    assert all(record["kl"] > 0 for record in records)
    # Noise in the rollout alone: the trainer's policy is another one.
    assert all(record["logprob_gap"] > 1e-3 for record in records)
    assert all(0 < record["importance_weight"] <= 1.2 for record in records)
    assert all(record["importance_weight"] != 1.0 for record in records)
    # The second optimizer step on a rollout meets the clip range.
    assert any(record["clipped_high"] + record["clipped_low"] > 0 for record in records)
    assert any(record["ratio"] != 1.0 for record in records)
    # Two optimizer steps a rollout: the rate is that of the last one, 8 in all.
    cosine = [0.025 * (1 + np.cos(np.pi * step / 8)) for step in (1, 3, 5, 7)]
    assert [r["learning_rate"] for r in records] == pytest.approx(cosine, rel=1e-5)
    assert all(record["reward/exact_number"] in (0.0, 0.125) for record in records)
    assert all(record["reward"] == record["reward/tiny_rewards:sevens"] for record in records)


def batch_with(experiment, rollout, *, num_iterations=1, **loss):
    config = dataclasses.replace(
        experiment.config,
        loss=dataclasses.replace(LossConfig(), **loss),
        optimizer=dataclasses.replace(experiment.config.optimizer, num_iterations=num_iterations),
    )
    changed = dataclasses.replace(experiment, config=config)
    batch, _ = make_batch(changed, new_state(experiment), rollout, NOISE_KEY, jnp.float32(0.5))
    return batch


@pytest.fixture(scope="module")
def rollout(experiment):
    """Return a noisy rollout of 8 rows; rows 1 and 6 count as ended, the others as cut."""
    state = new_state(experiment)
    given = sample(experiment, state, [0, 1], NOISE_KEY, SAMPLING_KEY, jnp.float32(0.5))
    return dataclasses.replace(given, finished=np.isin(np.arange(8), [1, 6]))


def test_truncated_completions_can_be_left_out(experiment, rollout):
    plain = batch_with(experiment, rollout)
    np.testing.assert_array_equal(plain.loss_mask, rollout.completion_mask)
    masked = batch_with(experiment, rollout, mask_truncated=True)
    kept = rollout.finished[:, None] & rollout.completion_mask
    np.testing.assert_array_equal(masked.loss_mask, kept)
    np.testing.assert_array_equal(masked.tokens.completion_mask, rollout.completion_mask)
    np.testing.assert_array_equal(masked.token_weights > 0, kept)
    # Their rewards still count in the group.
    np.testing.assert_array_equal(masked.advantages, plain.advantages)


def test_advantages_are_those_of_each_group(experiment, rollout):
    rewards = np.array([1, 0, 0, 0, 2, 2, 2, 2], np.float32)
    batch = batch_with(experiment, dataclasses.replace(rollout, rewards=rewards))
    expected = np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-4)
    np.testing.assert_allclose(batch.advantages, [*expected, 0, 0, 0, 0], atol=1e-6)


def test_old_logprobs_are_the_samplers_or_the_trainers(experiment, rollout):
    mask = rollout.completion_mask
    assert batch_with(experiment, rollout).old_logprobs is None
    sampler = batch_with(experiment, rollout, old_logprobs="sampler").old_logprobs
    np.testing.assert_array_equal(sampler, rollout.sampler_logprobs)
    trainer = batch_with(experiment, rollout, num_iterations=2).old_logprobs
    np.testing.assert_allclose(trainer[mask], rollout.sampler_logprobs[mask], atol=1e-5)
    assert not np.array_equal(trainer, sampler)


def test_the_reference_is_the_clean_base_and_only_there_if_asked_for(experiment, rollout):
    assert batch_with(experiment, rollout).ref_logprobs is None
    assert batch_with(experiment, rollout, log_kl=True).ref_logprobs is not None
    mask = rollout.completion_mask
    reference = batch_with(experiment, rollout, beta=0.1).ref_logprobs
    state = new_state(experiment)  # b = 0, so without noise it is the base model
    clean = experiment.old_logprobs(
        experiment.params, state.trainable, rollout.tokens, NOISE_KEY, jnp.float32(0.0)
    )
    np.testing.assert_allclose(reference[mask], clean[mask], atol=1e-5)
    assert np.abs(reference - rollout.sampler_logprobs)[mask].max() > 0.01


def test_the_keys_of_steps_and_uses_differ(key):
    drawn = [jax.random.normal(k) for step in range(3) for k in step_keys(key, step)]
    assert len({float(x) for x in drawn}) == 6


def test_a_run_shows_its_progress(tiny_home, tmp_path, trained):
    """`trained` has compiled the programs, so that this is quick."""
    config = load_config(tiny_home / "config.yaml", [f"--run_dir={tmp_path}/run", "--eval.every=2"])
    lines = []
    result = run_training(config, say=lines.append)
    folder = tmp_path / "run"
    assert (result.step, result.finished, result.run_dir) == (4, True, folder)
    steps = [line for line in lines if line.startswith("step ") and "[" in line]
    assert [line[: line.index("]") + 1] for line in steps] == [
        "step 1/4 [##........]",
        "step 2/4 [#####.....]",
        "step 3/4 [#######...]",
        "step 4/4 [##########]",
    ]
    assert steps[0].endswith("eta -:--") and steps[3].endswith("eta 0:00")
    assert all(re.search(r"eta \d+:\d\d$", line) for line in steps[1:])
    samples = [line for line in lines if line.startswith("  sample | ")]
    assert len(samples) == 2 and re.search(r"\d+\+\d+= -> .* \| reward [\d.]+$", samples[0])
    assert lines[-1].endswith(f"after; run folder {folder}")
    evaluations = read_jsonl(folder / "evaluations.jsonl")
    assert [record["step"] for record in evaluations] == [0, 2, 4]
    assert (result.before, result.after) == (evaluations[0]["accuracy"], evaluations[2]["accuracy"])
    written = read_jsonl(folder / "samples.jsonl")
    assert [record["step"] for record in written] == [2] * 4 + [4] * 4
    assert written[0].keys() >= {"prompt", "completion", "reward", "tokens", "finished"}
    records = read_jsonl(folder / "metrics.jsonl")
    expected = trained[2]
    for got, want in zip(records, expected, strict=True):
        names = [name for name in want if not name.startswith("time/")]
        assert {name: got[name] for name in names} == {
            name: np.asarray(want[name]).item() for name in names
        }


def test_an_overlay_does_not_write_into_the_base(experiment):
    scales = {"input_layernorm": jnp.zeros((2, 64)), "post_attention_layernorm": jnp.ones((2, 64))}
    trainable = Trainable(adapter=new_state(experiment).trainable.adapter, norm_scales=scales)
    before = bits(experiment.params)
    policy = policy_params(
        experiment.params, trainable, NOISE_KEY, jnp.float32(0.0), noise_targets=None
    )
    np.testing.assert_array_equal(policy["layers"]["input_layernorm"], np.zeros((2, 64)))
    assert bits(experiment.params) == before


def test_metrics_of_several_updates_are_means_but_for_what_the_sampler_saw(tiny_home):
    flags = ["--optimizer.num_iterations=3", "--optimizer.learning_rate=0.1"]
    flags += ["--optimizer.warmup_steps=0", "--aqn.enabled=false"]
    _, records, _ = train(build_experiment(load_config(tiny_home / "config.yaml", flags)), 2)
    assert all(record["logprob_gap"] < 1e-5 for record in records)
    assert any(abs(record["ratio"] - 1) > 1e-3 for record in records)
