"""Config files: golden error lines, inheritance, overrides, and the way back to text."""

from dataclasses import fields, replace
from pathlib import Path
from typing import get_origin

import pytest

from qerl_jax.config import (
    AqnConfig,
    DataConfig,
    ExperimentConfig,
    LossConfig,
    OptimizerConfig,
    RewardConfig,
)
from qerl_jax.config_decode import field_names, field_type
from qerl_jax.config_io import config_hash, diff_configs, dump_config, load_config, parse_config
from qerl_jax.config_rules import validate_config

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("**/*.yaml"))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes a config file into the working folder of the test."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "x.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    return write_file


BAD_FILES = {
    "optimizer: {learning_rte: 1}": (
        "x.yaml: optimizer.learning_rte is unknown (nearest: optimizer.learning_rate)"
    ),
    "learning_rate: 1.0": "x.yaml: learning_rate is unknown (nearest: optimizer.learning_rate)",
    "loss: {temperature: 1.0}": (
        "x.yaml: loss.temperature is unknown (nearest: rollout.temperature or eval.temperature)"
    ),
    "optimiser: {eps: 1.0}": "x.yaml: optimiser is unknown (nearest: optimizer)",
    "zzz: 1": "x.yaml: zzz is unknown",
    "2: 1": "x.yaml: 2 is unknown",
    "loss.beta: 0.1": 'x.yaml: "loss.beta" is written with a dot; write loss: {beta: ...}',
    "rollout: {num_generations: eight}": (
        'x.yaml: rollout.num_generations: expected int, got "eight"'
    ),
    "rollout: {num_generations: 8.0}": "x.yaml: rollout.num_generations: expected int, got 8.0",
    "rollout: {num_generations: '8'}": 'x.yaml: rollout.num_generations: expected int, got "8"',
    "rollout: {num_generations: true}": "x.yaml: rollout.num_generations: expected int, got true",
    "rollout: {num_generations: null}": "x.yaml: rollout.num_generations: expected int, got null",
    "rollout: {temperature: true}": "x.yaml: rollout.temperature: expected float, got true",
    "rollout: {temperature: nan}": 'x.yaml: rollout.temperature: expected float, got "nan"',
    "rollout:": "x.yaml: rollout: expected a mapping of settings, got null",
    "model: {remat: 1}": "x.yaml: model.remat: expected bool, got 1",
    "model: {path: 3}": "x.yaml: model.path: expected str, got 3",
    "run_dir: 2024-01-02": "x.yaml: run_dir: expected str, got 2024-01-02",
    "model: {compute_dtype: f32}": (
        'x.yaml: model.compute_dtype: expected one of float32, bfloat16, got "f32"'
    ),
    "data: {train_size: all}": 'x.yaml: data.train_size: expected int or null, got "all"',
    "data: {task: {max: 1.5}}": "x.yaml: data.task.max: expected int, got 1.5",
    "loss: {extra: [1]}": ("x.yaml: loss.extra: expected a mapping of str to float, got a list"),
    "loss: {extra: {1: 2}}": "x.yaml: loss.extra (a key): expected str, got 1",
    "reward: {functions: exact_number}": (
        'x.yaml: reward.functions: expected a list of str, got "exact_number"'
    ),
    "reward: {weights: [1, x]}": 'x.yaml: reward.weights[1]: expected float, got "x"',
    "seed: 1\nloss: {beta: 0}\nseed: 2": "x.yaml:3: seed is already set on line 1",
    "loss:\n  beta: 0\n  beta: 1": "x.yaml:3: beta is already set on line 2",
    "- seed": "x.yaml: expected a mapping of settings, got a list",
    "# nothing": "x.yaml: expected a mapping of settings, got an empty file",
    "seed: 1\n\tlr: 2": (
        "x.yaml:2: invalid YAML: found character '\\t' that cannot start any token"
    ),
    "run_dir: 2024-13-45": "x.yaml: invalid YAML: month must be in 1..12",
    "base: 3": "x.yaml: base: expected a file name or a list of file names",
    "base: x.yaml": "x.yaml: base: the files form a cycle: x.yaml -> x.yaml",
    "base: .": "x.yaml: base: .: is a folder, not a config file",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_file_is_refused_in_one_line(write, text):
    with pytest.raises(ValueError) as refusal:
        load_config(write(text))
    assert str(refusal.value) == BAD_FILES[text]


BAD_OVERRIDES = {
    ("--optimizer.learning_rte", "1"): (
        "--optimizer.learning_rte is unknown (nearest: --optimizer.learning_rate)"
    ),
    ("--rollout.num_generations", "eight"): (
        '--rollout.num_generations: expected int, got "eight"'
    ),
    ("--rollout.num_generations=",): "--rollout.num_generations: expected int, got null",
    ("--reward.weights", "1,,2"): "--reward.weights[1]: expected float, got null",
    ("--loss", "grpo"): "--loss is a section; set one of its fields, as in --loss.name",
    ("--loss.beta.x", "1"): "--loss.beta.x is unknown (nearest: --loss.beta)",
    ("--loss.extra.", "1"): "--loss.extra. is unknown (nearest: --loss.extra)",
    ("--base", "x.yaml"): "--base is unknown",
    ("--loss.mask_truncated",): (
        "--loss.mask_truncated: needs a value, as in --loss.mask_truncated VALUE or "
        "--loss.mask_truncated=VALUE"
    ),
    ("--loss.mask_truncated", "--seed", "1"): (
        "--loss.mask_truncated: needs a value, as in --loss.mask_truncated VALUE or "
        "--loss.mask_truncated=VALUE"
    ),
    ("seed", "1"): 'unexpected "seed": an override is --section.field value',
}


@pytest.mark.parametrize("overrides", BAD_OVERRIDES)
def test_bad_override_is_refused_in_one_line(write, overrides):
    with pytest.raises(ValueError) as refusal:
        load_config(write("{}"), overrides)
    assert str(refusal.value) == BAD_OVERRIDES[overrides]


def test_missing_files_are_named(write):
    with pytest.raises(FileNotFoundError, match=r"^no/x\.yaml: no such config file$"):
        load_config("no/x.yaml")
    with pytest.raises(FileNotFoundError) as refusal:
        load_config(write("base: ../no.yaml", "sub/x.yaml"))
    assert str(refusal.value) == "sub/x.yaml: base: no.yaml: no such config file"


def test_bytes_that_are_not_text_are_refused(write, tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"seed: \xff")
    with pytest.raises(ValueError, match=r"^x\.yaml: is not UTF-8 text \(byte 6\)$"):
        load_config("x.yaml")


def test_values_are_typed_by_their_field(write):
    text = """
        optimizer: {learning_rate: 3e-5, max_grad_norm: 1, micro_batch_size: 8}
        reward: {functions: [a, b], weights: [1, 2e-1]}
        loss: {extra: {scale: 1e-3}, importance_cap: null}
        data: {train_path: "null", task: {max: 9}}
    """
    config = load_config(write(text))
    assert config.optimizer == OptimizerConfig(
        learning_rate=3e-5, max_grad_norm=1.0, micro_batch_size=8
    )
    assert isinstance(config.optimizer.max_grad_norm, float)
    assert config.reward == RewardConfig(functions=("a", "b"), weights=(1.0, 0.2))
    assert config.loss == LossConfig(extra={"scale": 1e-3})
    assert config.data == DataConfig(train_path="null", task={"max": 9})


def test_overrides_are_typed_by_their_field(write):
    path = write("optimizer: {learning_rate: 1.0, b1: 0.5, micro_batch_size: 4}\nseed: 1")
    overrides = [
        *("--optimizer.learning_rate", "3e-5", "--optimizer.micro_batch_size=null"),
        *("--reward.functions", "[a,b]", "--reward.weights", "1, -2.5", "--lora.targets=q_proj"),
        *("--loss.extra", "{x: 1}", "--loss.extra.y", "2e-1", "--loss.mask_truncated", "true"),
        *("--data.task.max_terms", "3", "--data.train_path", "null", "--data.name", "null"),
        *("--data.prompt_template", "a=b: {question}", "--run_dir", "5", "--seed", "2"),
        "--seed=3",
    ]
    config = load_config(path, overrides)
    assert config.optimizer == OptimizerConfig(learning_rate=3e-5, b1=0.5)
    assert config.reward == RewardConfig(functions=("a", "b"), weights=(1.0, -2.5))
    assert config.lora.targets == ("q_proj",)
    assert config.loss == LossConfig(extra={"x": 1.0, "y": 0.2}, mask_truncated=True)
    assert config.data == DataConfig(
        task={"max_terms": 3}, name="null", prompt_template="a=b: {question}"
    )
    assert (config.run_dir, config.seed) == ("5", 3)


def test_every_field_takes_its_own_value_from_the_command_line(write):
    path = write("{}")
    for name in [name for name in field_names() if "." in name or name in ("run_dir", "seed")]:
        value = ExperimentConfig()
        for part in name.split("."):
            value = getattr(value, part)
        is_list = get_origin(field_type(name)) is tuple
        text = ",".join(map(str, value)) if is_list else "null" if value is None else str(value)
        text = text.lower() if isinstance(value, bool) else text
        assert load_config(path, [f"--{name}={text}"]) == ExperimentConfig(), name


def test_bases_merge_in_order_below_the_file(write):
    write("seed: 1\nloss: {beta: 0.1, epsilon_low: 0.3}\ndata: {task: {a: 1}}", "one.yaml")
    write("base: deep/three.yaml\nloss: {beta: 0.2, extra: {}}", "two.yaml")
    write("seed: 3\nrollout: {top_k: 3}", "deep/three.yaml")
    path = write("base: [../one.yaml, ../two.yaml]\ndata: {task: {b: 2}}", "sub/x.yaml")
    config = load_config(path)
    assert config.seed == 3
    assert config.loss == LossConfig(beta=0.2, epsilon_low=0.3)
    assert config.rollout.top_k == 3
    assert config.data.task == {"b": 2}  # a field is replaced whole


def test_a_mistake_in_a_base_names_the_base(write):
    write("loss: {bta: 1}", "one.yaml")
    with pytest.raises(ValueError, match=r"^one\.yaml: loss\.bta is unknown"):
        load_config(write("base: one.yaml\nloss: {beta: 0.0}"))


def test_base_chains_are_bounded(write):
    write("seed: 4", "4.yaml")
    for depth in (3, 2, 1, 0):
        write(f"base: {depth + 1}.yaml", f"{depth}.yaml")
    assert load_config("1.yaml").seed == 4
    with pytest.raises(ValueError) as refusal:
        load_config("0.yaml")
    chain = "0.yaml -> 1.yaml -> 2.yaml -> 3.yaml -> 4.yaml"
    assert str(refusal.value) == f"3.yaml: base: deeper than 3 files: {chain}"


def test_a_longer_cycle_is_refused(write):
    write("base: x.yaml", "y.yaml")
    with pytest.raises(ValueError, match=r"cycle: x\.yaml -> y\.yaml -> x\.yaml$"):
        load_config(write("base: y.yaml"))


TRICKY = (
    *("null", "true", "3e-5", "1_0", "~", "", " a ", "a: b # c", "- x", "2024-01-02", "{question}"),
    *("line\nnext\n\n", "tab\t", "\x01\x85\u2028", "Frage: größer? 数", "'\"\\", "x" * 300),
)


@pytest.mark.parametrize("text", TRICKY)
def test_dump_round_trips_any_text(text):
    config = ExperimentConfig(
        run_dir=text,
        data=DataConfig(system_prompt=text, task={text: 1}),
        reward=RewardConfig(functions=(text, "b"), weights=(1e-300, 1.0)),
        loss=LossConfig(extra={text: 1e22}),
    )
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize("number", [0.0, -0.0, 1e-5, 1 / 3, 1e22, float("inf"), 5e-324])
def test_dump_keeps_every_bit_of_a_float(number):
    config = ExperimentConfig(optimizer=OptimizerConfig(learning_rate=number))
    loaded = parse_config(dump_config(config)).optimizer.learning_rate
    assert loaded.hex() == number.hex()


def test_dump_keeps_the_order_of_the_fields():
    lines = dump_config(ExperimentConfig()).splitlines()
    sections = [line.partition(":")[0] for line in lines if not line.startswith((" ", "-"))]
    assert sections == [f.name for f in fields(ExperimentConfig)]


def test_parse_names_its_place():
    with pytest.raises(ValueError, match=r'^runs/a/config: seed: expected int, got "x"$'):
        parse_config("seed: x", where="runs/a/config")


def test_differences_are_listed_and_change_the_hash():
    old = ExperimentConfig()
    new = replace(
        old,
        run_dir="läufe",
        optimizer=replace(old.optimizer, learning_rate=3e-5, micro_batch_size=4),
        aqn=AqnConfig(targets=("norm",)),
    )
    assert diff_configs(old, new) == [
        'run_dir: "runs/default" -> "läufe"',
        'aqn.targets: ["input_layernorm", "post_attention_layernorm"] -> ["norm"]',
        "optimizer.learning_rate: 1e-05 -> 3e-05",
        "optimizer.micro_batch_size: null -> 4",
    ]
    assert diff_configs(old, ExperimentConfig()) == []
    assert config_hash(old) == config_hash(ExperimentConfig())
    assert config_hash(old) != config_hash(replace(old, seed=1)) != config_hash(new)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_config_loads_and_round_trips(path):
    config = load_config(path)
    validate_config(config)
    assert parse_config(dump_config(config)) == config
