"""What the subcommands do to files: evaluation, quantize, export-adapter, dry runs."""

import io
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from qerl_jax import commands
from qerl_jax.base_model import load_weights, open_model
from qerl_jax.config import (
    AqnConfig,
    DataConfig,
    EvalConfig,
    ExperimentConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from qerl_jax.experiment import build_experiment
from qerl_jax.plan import describe_plan
from qerl_jax.quant import NvFp4Tensor
from qerl_jax.tree import num_bytes

PROBLEMS = 20


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Return the config of a run of 2 steps whose noise would wreck any evaluation it reached.

    Nothing is right under such noise: a reward of the user's own, and a high temperature, make
    the completions of a group differ.
    """
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "digit_sum.py").write_text(
        "def digit_sum(prompt, completion, answer):\n"
        "    return float(sum(map(int, filter(str.isdigit, completion))))\n"
    )
    sys.path.insert(0, str(folder))
    yield ExperimentConfig(
        run_dir=str(tmp_path_factory.mktemp("runs") / "run"),
        model=ModelConfig(compute_dtype="float32", remat=False),
        lora=LoraConfig(rank=4, train_norms=True),
        aqn=AqnConfig(schedule="constant", sigma_start=5.0),
        data=DataConfig(train_size=64, eval_size=PROBLEMS),
        rollout=RolloutConfig(
            prompts_per_step=2, num_generations=4, max_completion_tokens=4, temperature=10.0
        ),
        reward=RewardConfig(functions=("exact_number", "digit_sum:digit_sum"), weights=(1.0, 0.1)),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        train=TrainConfig(total_steps=2, checkpoint_every=1),
        eval=EvalConfig(batch_size=16, num_samples=2, temperature=0.7),
    )
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def printed(config):
    """Train, and return what that printed."""
    with redirect_stdout(io.StringIO()) as output:
        commands.train(config, quiet=True)
    return output.getvalue()


@pytest.fixture(scope="module")
def run(config, printed):
    """Return the folder of the finished run."""
    return Path(config.run_dir)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(record):
    return {name: value for name, value in record.items() if not name.startswith("time/")}


# eval


@pytest.mark.parametrize("step", [0, 2], ids=["before", "after"])
def test_eval_gives_the_numbers_that_training_gave(config, run, tmp_path, step):
    """The same harness, without the noise of the run, whether or not the config has any."""
    (recorded,) = (r for r in records(run / "evaluations.jsonl") if r["step"] == step)
    quiet = replace(config, aqn=AqnConfig(enabled=False))
    for name, settings in (("noisy", config), ("quiet", quiet)):
        out = tmp_path / f"{name}.jsonl"
        commands.evaluate(settings, adapter=str(run / "adapter") if step else None, out=str(out))
        report = records(out)[0]["report"]
        assert untimed(report) == untimed({k: v for k, v in recorded.items() if k != "step"}), name


def test_before_and_after_differ(run):
    before, after = map(untimed, records(run / "evaluations.jsonl"))
    assert {**before, "step": 2} != after


def test_rows_of_an_evaluation_add_up_to_its_report(config, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    commands.evaluate(config, limit=9, out=str(out))
    head, *rows = records(out)
    report = head["report"]
    assert len(rows) == 18  # the last batch of 16 holds 2
    assert [(row["index"], row["sample"]) for row in rows] == [
        (i, s) for i in range(9) for s in range(2)
    ]
    assert (report["num_problems"], report["num_samples"]) == (9, 2)
    assert report["accuracy"] == pytest.approx(np.mean([row["correct"] for row in rows]))
    assert report["length_mean"] == pytest.approx(np.mean([row["tokens"] for row in rows]))
    assert 0 < sum(row["correct"] for row in rows) < 18
    for row in rows:
        assert row["correct"] == (row["completion"] == row["answer"])
        digits = sum(int(c) for c in row["completion"] if c.isdigit())
        assert row["reward"] == pytest.approx(row["correct"] + 0.1 * digits)
        left, right = row["prompt"].rstrip("=").split("+")
        assert int(left) + int(right) == int(row["answer"])
    assert capsys.readouterr().out.startswith("base model: ")


def test_eval_split_chooses_the_problems(config, tmp_path):
    prompts = {}
    for split in ("eval", "train"):
        out = tmp_path / f"{split}.jsonl"
        commands.evaluate(config, split=split, out=str(out))
        prompts[split] = {row["prompt"] for row in records(out)[1:]}
    assert len(prompts["eval"]) <= PROBLEMS
    assert not prompts["eval"] & prompts["train"]


def refuse_to_load(*_, **__):
    raise AssertionError("the weights were read before the input was checked")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"adapter": "no/adapter"}, "no/adapter: no such adapter folder"),
        ({"out": "no/folder/rows.jsonl"}, "--out: no/folder/rows.jsonl cannot be written"),
    ],
)
def test_eval_refuses_before_the_weights_are_read(config, monkeypatch, flags, message):
    monkeypatch.setattr("qerl_jax.experiment.load_weights", refuse_to_load)
    with pytest.raises(ValueError, match=message):
        commands.evaluate(config, **flags)


# quantize


@pytest.mark.parametrize("rounding", ["float32", "bfloat16"])
def test_a_quantized_folder_loads_bit_for_bit(tmp_path, capsys, rounding):
    out = tmp_path / "nvfp4"
    commands.quantize(model="tiny", out=str(out), scale_rounding=rounding)
    dense = open_model("tiny", dtype="float32")
    expected = load_weights(dense, quantize=True, scale_rounding=rounding)
    folder = open_model(str(out), dtype="float32")
    got = load_weights(folder, quantize=False, scale_rounding="float32")
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for name, a, b in zip(
        (jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(got)),
        jax.tree.leaves(got),
        jax.tree.leaves(expected),
        strict=True,
    ):
        assert a.dtype == b.dtype, name
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name
    assert isinstance(got["layers"]["q_proj"]["weight"], NvFp4Tensor)
    assert (folder.end_ids, folder.pad_id) == (dense.end_ids, dense.pad_id)
    assert folder.tokenizer("17+58=")["input_ids"] == dense.tokenizer("17+58=")["input_ids"]
    assert capsys.readouterr().out == f"{out}: {num_bytes(got) / 2**20:.1f} MiB\n"


def test_scale_rounding_reaches_the_quantizer():
    folder = open_model("tiny", dtype="float32", text=False)
    wide, narrow = (
        load_weights(folder, quantize=True, scale_rounding=r) for r in ("float32", "bfloat16")
    )
    scales = [tree["layers"]["down_proj"]["weight"].global_scale for tree in (wide, narrow)]
    assert not np.array_equal(*scales)


def test_quantize_refuses_what_is_there_and_what_is_quantized(tmp_path, golden):
    with pytest.raises(FileExistsError, match=f"--out: {tmp_path} exists"):
        commands.quantize(model="tiny", out=str(tmp_path), scale_rounding="float32")
    model = str(golden / "tiny_qwen2/ct_nvfp4a16")
    with pytest.raises(ValueError, match=r"--model: .*ct_nvfp4a16 is quantized already"):
        commands.quantize(model=model, out=str(tmp_path / "x"), scale_rounding="float32")
    assert not list(tmp_path.iterdir())


# export-adapter


def test_the_last_checkpoint_is_the_adapter_of_the_run(run, tmp_path, capsys):
    out = tmp_path / "adapter"
    capsys.readouterr()
    commands.export_adapter(run_dir=str(run), out=str(out), step=None)
    assert capsys.readouterr().out == f"{out}: adapter of step 2\n"
    for path in (run / "adapter").iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name
    assert len(list(out.iterdir())) == len(list((run / "adapter").iterdir()))


def test_an_earlier_checkpoint_is_another_adapter(run, tmp_path):
    commands.export_adapter(run_dir=str(run), out=str(tmp_path / "one"), step=1)
    one = load_file(tmp_path / "one/adapter_model.safetensors")
    two = load_file(run / "adapter/adapter_model.safetensors")
    assert one.keys() == two.keys()
    assert any(not np.array_equal(one[name], two[name]) for name in one)


def test_export_leaves_the_run_as_it_is(run, tmp_path):
    def listing():
        return {path: path.stat().st_mtime_ns for path in run.rglob("*")}

    before = listing()
    commands.export_adapter(run_dir=str(run), out=str(tmp_path / "adapter"), step=None)
    assert listing() == before


def test_export_refuses_what_it_cannot_give(run, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a run folder \(no config.resolved.yaml\)"):
        commands.export_adapter(run_dir=str(tmp_path), out=str(tmp_path / "x"), step=None)
    with pytest.raises(ValueError, match=r"holds no step 7; there are 1, 2"):
        commands.export_adapter(run_dir=str(run), out=str(tmp_path / "x"), step=7)
    (tmp_path / "young").mkdir()
    (tmp_path / "young/config.resolved.yaml").write_text((run / "config.resolved.yaml").read_text())
    with pytest.raises(FileNotFoundError, match="young: holds no checkpoint"):
        commands.export_adapter(run_dir=str(tmp_path / "young"), out=str(tmp_path / "x"), step=None)
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileExistsError, match="taken: exists"):
        commands.export_adapter(run_dir=str(run), out=str(tmp_path / "taken"), step=None)
    assert not (tmp_path / "x").exists()


# train


def test_a_dry_run_shows_the_plan_and_writes_nothing(config, tmp_path, capsys):
    planned = replace(config, run_dir=str(tmp_path / "planned"))
    commands.train(planned, dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("model", "base", "trained", "optimizer", "KV", "expanded", "data", "run")
    ]
    assert f"64 training prompts (0 too long), {PROBLEMS} held-out" in lines[6]
    assert not (tmp_path / "planned").exists()


def test_a_dry_run_refuses_what_a_run_would(config, run):
    with pytest.raises(FileExistsError, match=r"run_dir: .* exists; --resume continues it"):
        commands.train(config, dry_run=True)


def test_the_plan_is_what_the_model_takes(config):
    """Bytes of the packed base, of its expansion, and of the cache, counted on real arrays."""
    experiment = build_experiment(config)
    plan = dict(line.split(maxsplit=1) for line in describe_plan(experiment).splitlines())
    assert plan["base"].startswith(f"{num_bytes(experiment.params) / 2**20:.1f} MiB as nvfp4")
    linears = [
        leaf["weight"]
        for leaf in experiment.params["layers"].values()
        if isinstance(leaf, dict) and isinstance(leaf["weight"], NvFp4Tensor)
    ]
    expanded = sum(4 * np.prod(weight.shape) for weight in linears)
    assert plan["expanded"] == f"{expanded / 2**20:.1f} MiB during rollouts"
    model, slots = experiment.model.config, experiment.prompt_width + 4
    cache = 2 * 4 * model.num_layers * model.num_kv_heads * model.head_dim * 8 * slots
    assert plan["KV"] == f"cache     {cache / 2**20:10.1f} MiB for 8 rows x {slots} tokens"


def test_quiet_training_prints_the_run_folder_alone(config, printed):
    assert printed == f"{config.run_dir}\n"


# convert


def test_convert_says_where_the_folder_is(monkeypatch, capsys):
    received = []
    monkeypatch.setattr(commands, "convert_gguf", lambda *a, **k: received.append((a, k)))
    commands.convert(gguf="a.gguf", out="folder", tie=True)
    assert received == [(("a.gguf", "folder"), {"tie": True})]
    assert capsys.readouterr().out == "folder\n"
