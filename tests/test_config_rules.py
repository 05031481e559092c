"""Bounds and rules between fields: golden error lines and the notes."""

import math
from typing import get_args

import pytest

from qerl_jax.config import ExperimentConfig
from qerl_jax.config_decode import decode, field_names, field_type
from qerl_jax.config_rules import (
    BOUNDS,
    LARGEST,
    interval_problem,
    validate_config,
)
from qerl_jax.config_warnings import config_warnings


def config_of(**sections: dict) -> ExperimentConfig:
    return decode(ExperimentConfig, sections)


def one_field(name: str, value: object) -> ExperimentConfig:
    section, _, field = name.rpartition(".")
    return config_of(**{section: {field: value}} if section else {field: value})


def number_fields() -> set[str]:
    names = [name for name in field_names() if "." in name or name in ("run_dir", "seed")]
    kinds = {name: field_type(name) for name in names}
    required = {name: set(get_args(k)) - {type(None)} or {k} for name, k in kinds.items()}
    return {name for name, types in required.items() if types in ({int}, {float})}


def test_every_number_is_bounded():
    assert set(BOUNDS) == number_fields()


def test_defaults_are_valid():
    validate_config(ExperimentConfig())


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_numbers_outside_their_interval_are_refused_by_name(name):
    interval = BOUNDS[name].removeprefix("0 or ")
    low, high = (float(end) for end in interval[1:-1].split(", "))
    high = LARGEST if high == math.inf else high
    is_int = {field_type(name), *get_args(field_type(name))} & {int}
    outside = [low - 1, high + 1] if is_int else [low - 0.5, high + 0.5, math.nan, math.inf]
    outside += [low] if interval[0] == "(" else []
    outside += [high] if interval[-1] == ")" and high != LARGEST else []
    for value in outside:
        with pytest.raises(ValueError, match=f"^{name}: expected "):
            validate_config(one_field(name, int(value) if is_int else value))


@pytest.mark.parametrize(
    ("value", "interval", "message"),
    [
        (0, "[1, inf)", "expected >= 1, got 0"),
        (0.0, "(0, inf)", "expected > 0, got 0.0"),
        (1.5, "(0, 1]", "expected a number in (0, 1], got 1.5"),
        (1.0, "[0, 1)", "expected a number in [0, 1), got 1.0"),
        (math.nan, "[0, 1)", "expected a finite number, got nan"),
        (math.inf, "(0, inf)", "expected a finite number, got inf"),
        (-math.inf, "(0, inf)", "expected a finite number, got -inf"),
        (10**30, "[1, inf)", f"expected at most 1000000000, got 1{30 * '0'}"),
        (1e-50, "0 or [0.001, inf)", "expected 0 or >= 0.001, got 1e-50"),
        (0.0, "0 or [0.001, inf)", None),
        (0.001, "0 or [0.001, inf)", None),
        (1, "[1, inf)", None),
        (1.0, "(0, 1]", None),
        (0.0, "[0, 1)", None),
    ],
)
def test_interval_problem(value, interval, message):
    assert interval_problem(value, interval) == message


REFUSED = [
    ({"run_dir": " "}, "run_dir: is empty"),
    ({"model": {"path": ""}}, "model.path: is empty"),
    ({"lora": {"targets": []}}, "lora.targets: the list is empty"),
    ({"lora": {"targets": ["q_proj", "q_proj"]}}, 'lora.targets: "q_proj" is listed twice'),
    (
        {"lora": {"targets": ["qproj"]}},
        'lora.targets: "qproj" is not one of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, '
        "down_proj",
    ),
    ({"aqn": {"targets": []}}, "aqn.targets: the list is empty"),
    ({"loss": {"name": "a:b:c"}}, 'loss.name: "a:b:c" is not of the form module:function'),
    ({"loss": {"advantage": "m:"}}, 'loss.advantage: "m:" is not of the form module:function'),
    ({"aqn": {"schedule": ":f"}}, 'aqn.schedule: ":f" is not of the form module:function'),
    ({"eval": {"correct": "a b:f"}}, 'eval.correct: "a b:f" is not of the form module:function'),
    (
        {"reward": {"functions": ["./r.py:f"]}},
        'reward.functions: "./r.py:f" is not of the form module:function',
    ),
    (
        {"aqn": {"sigma_start": 1e-4, "sigma_end": 1e-2}},
        "aqn.sigma_end: 0.01 exceeds aqn.sigma_start, 0.0001",
    ),
    (
        {"aqn": {"sigma_end": 0.0}},
        "aqn.sigma_end: expected > 0 for the schedule released, got 0.0",
    ),
    (
        {"aqn": {"apply_to": "rollout"}},
        "aqn.apply_to: rollout samples off-policy; set loss.old_logprobs: sampler or "
        "loss.importance_cap",
    ),
    (
        {"data": {"source": "jsonl"}},
        "data.train_path: data.source jsonl needs the path of a file",
    ),
    (
        {"data": {"train_path": "a.jsonl"}},
        "data.train_path: is read for source jsonl only, not arithmetic",
    ),
    (
        {"data": {"source": "hub", "task": {"a": 1}}},
        "data.task: is read for source arithmetic and reasoning_gym only, not hub",
    ),
    (
        {"data": {"answer_marker": "####"}},
        "data.answer_marker: is read for source hub and jsonl only, not arithmetic",
    ),
    ({"lora": {"init_from": ""}}, "lora.init_from: is empty"),
    ({"eval": {"correct": " "}}, "eval.correct: is empty"),
    (
        {"train": {"total_steps": 10**9}, "optimizer": {"num_iterations": 2}},
        "optimizer.num_iterations: train.total_steps x optimizer.num_iterations is 2000000000, "
        "expected at most 1000000000",
    ),
    ({"data": {"name": ""}}, "data.name: is empty; data.source arithmetic needs it"),
    (
        {"data": {"system_prompt": "Think."}},
        "data.system_prompt: has no place without data.chat_template: true",
    ),
    ({"data": {"prompt_template": "Q:"}}, "data.prompt_template: does not hold {question}"),
    (
        {"reward": {"functions": [], "weights": []}},
        "reward.functions: the list is empty",
    ),
    (
        {"reward": {"functions": ["a", "b"]}},
        "reward.weights: 1 for 2 reward.functions; expected one weight each",
    ),
    ({"reward": {"weights": [math.inf]}}, "reward.weights: expected finite numbers, got inf"),
    (
        {"loss": {"name": "dapo", "beta": 0.1}},
        "loss.beta: dapo has no KL term; expected 0, got 0.1",
    ),
    (
        {"loss": {"old_logprobs": "sampler", "importance_cap": 2.0}},
        "loss.importance_cap: corrects nothing with loss.old_logprobs: sampler, whose ratio is to "
        "the sampler already; set one of them",
    ),
    (
        {"loss": {"extra": {"a": 1.0}}},
        "loss.extra: only a module:function takes it, neither grpo nor auto",
    ),
    (
        {"loss": {"name": "m:f", "extra": {"a": math.nan}}},
        "loss.extra.a: expected a finite number, got nan",
    ),
    (
        {"optimizer": {"micro_batch_size": 48}},
        "optimizer.micro_batch_size: 48 does not divide 128 "
        "(rollout.prompts_per_step x rollout.num_generations)",
    ),
    (
        {"optimizer": {"warmup_steps": 20, "num_iterations": 2}, "train": {"total_steps": 10}},
        "optimizer.warmup_steps: expected < 20 "
        "(train.total_steps x optimizer.num_iterations), got 20",
    ),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_rule_is_kept_with_one_line(sections, message):
    with pytest.raises(ValueError) as refusal:
        validate_config(config_of(**sections))
    assert str(refusal.value) == message


ALLOWED = [
    {"aqn": {"enabled": False, "sigma_end": 0.0, "apply_to": "rollout"}},
    {"aqn": {"schedule": "linear", "sigma_end": 0.0}},
    {"aqn": {"apply_to": "rollout"}, "loss": {"old_logprobs": "sampler"}},
    {"aqn": {"apply_to": "rollout"}, "loss": {"importance_cap": 2.0}},
    {"aqn": {"sigma_start": 1e-2, "sigma_end": 1e-2, "num_stages": 1}},
    {"data": {"source": "jsonl", "train_path": "a.jsonl", "eval_path": "b.jsonl", "name": ""}},
    {"data": {"chat_template": True, "system_prompt": ""}},
    {"data": {"source": "reasoning_gym", "name": "chain_sum", "task": {"max_terms": 2}}},
    {"loss": {"name": "my.losses:f_1", "beta": 0.1, "extra": {"a": -1.0}}},
    {"loss": {"name": "dapo", "epsilon_low": 1.0, "epsilon_high": 1.5}},
    {"optimizer": {"micro_batch_size": 32, "warmup_steps": 99, "b1": 0.0}},
    {"rollout": {"top_p": 1.0, "min_p": 0.0, "num_generations": 2}},
    {"eval": {"temperature": 0.0, "correct": "m:f"}},
]


@pytest.mark.parametrize("sections", ALLOWED, ids=str)
def test_edge_of_a_rule_is_allowed(sections):
    validate_config(config_of(**sections))


QUIET = {"loss": {"old_logprobs": "sampler"}}
NOTED = [
    ({"loss": {"epsilon_high": 0.28}}, "loss.epsilon_low, loss.epsilon_high: clipping is inert"),
    ({**QUIET, "loss": {"beta": 0.1, "kl_estimator": "k1"}}, "loss.kl_estimator: the gradient"),
    ({**QUIET, "aqn": {"num_stages": 1}}, "aqn.enabled: the schedule released has no step with"),
    (
        {**QUIET, "aqn": {"num_stages": 1, "schedule": "linear"}},
        "aqn.enabled: the schedule linear has no step with",
    ),
    ({**QUIET, "train": {"total_steps": 1}}, "aqn.enabled: the schedule released has no step"),
    ({**QUIET, "reward": {"functions": ["m:f"]}}, "eval.correct: accuracy counts"),
    (
        {**QUIET, "reward": {"functions": ["format_tags", "exact_number"], "weights": [1.0, 1.0]}},
        "eval.correct: accuracy counts the completions that format_tags",
    ),
    ({**QUIET, "rollout": {"top_p": 0.9}}, "rollout.top_k, top_p, min_p: "),
    ({**QUIET, "rollout": {"top_k": 5}}, "rollout.top_k, top_p, min_p: "),
    ({**QUIET, "rollout": {"min_p": 0.1}}, "rollout.top_k, top_p, min_p: "),
    ({**QUIET, "reward": {"weights": [0.0]}}, "reward.weights: all are 0"),
    ({**QUIET, "eval": {"num_samples": 4}}, "eval.num_samples: greedy samples"),
    (
        {**QUIET, "aqn": {"sigma_start": 0.0, "sigma_end": 0.0}},
        "aqn.enabled: the schedule released",
    ),
    ({"loss": {"name": "dapo", "old_logprobs": "sampler"}}, "loss.epsilon_high: DAPO's upper clip"),
    (
        {**QUIET, "data": {"source": "jsonl", "train_path": "a", "eval_path": "a"}},
        "data.eval_path: is data.train_path",
    ),
    (
        {**QUIET, "data": {"source": "jsonl", "train_path": "a", "eval_path": "./a"}},
        "data.eval_path: is data.train_path",
    ),
]


@pytest.mark.parametrize(("sections", "note"), NOTED, ids=lambda x: str(x)[:40])
def test_surprising_settings_are_noted(sections, note):
    (found,) = config_warnings(config_of(**sections))
    assert found.startswith(note)


def test_nothing_is_noted_without_reason():
    assert config_warnings(config_of()) == config_warnings(config_of(**QUIET)) == ()
    assert config_warnings(config_of(optimizer={"num_iterations": 2})) == ()
