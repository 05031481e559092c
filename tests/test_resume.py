"""A run that is stopped, by itself, by a signal or by kill -9, ends as one that never was."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest

from qerl_jax.checkpoint import open_checkpoints, restore
from qerl_jax.cli import main
from qerl_jax.config_io import config_hash, load_config
from qerl_jax.experiment import open_experiment_model
from qerl_jax.metrics import read_jsonl
from qerl_jax.models import abstract_params
from qerl_jax.parts import build_optimizer
from qerl_jax.state import init_state
from qerl_jax.train import run_training
from qerl_jax.tree import flatten_arrays

# Runs `qerl` and dies by kill -9 at a chosen point of a save: when orbax has made its temporary
# folder and makes the first one inside it, or when all is written and is to be renamed.
KILLED = """
import os, signal, sys
point, step = sys.argv[1].split(":")

def watch(event, arguments):
    if event == point and f"checkpoints/{step}.orbax" in os.fsdecode(arguments[0]):
        inside = os.fsdecode(arguments[0]).split(f"checkpoints/{step}.orbax")[1].count("/")
        if inside == (1 if event == "os.mkdir" else 0):
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
from qerl_jax.cli import main
sys.exit(main(sys.argv[2:]))
"""

# Runs `qerl` and receives SIGTERM in its second step.
TERMINATED = """
import os, signal, sys
from qerl_jax import train
from qerl_jax.cli import main
step = train.train_step

def interrupted(experiment, state, cursor):
    if int(state.step) == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(experiment, state, cursor)

train.train_step = interrupted
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def config_at(tiny_home):
    return lambda path, *overrides: load_config(
        tiny_home / "config.yaml", [f"--run_dir={path}", *overrides]
    )


@pytest.fixture(scope="module")
def whole(config_at, tmp_path_factory):
    """Return the folder of a run of 4 steps that nothing stopped."""
    path = tmp_path_factory.mktemp("whole") / "run"
    run_training(config_at(path), say=lambda line: None)
    return path


def python(script, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )


def arguments(tiny_home, path, *flags):
    return ["train", str(tiny_home / "config.yaml"), f"--run_dir={path}", *flags]


def last_checkpoint(path, config):
    """Return (bits of every array of the last state, data cursor)."""
    shapes = abstract_params(open_experiment_model(config).config)
    like = jax.eval_shape(partial(init_state, config, build_optimizer(config)), shapes)
    restored = restore(open_checkpoints(path / "checkpoints", read_only=True), like)
    assert restored.meta["config_hash"] == config_hash(config)
    state = restored.state.replace(key=jax.random.key_data(restored.state.key))
    arrays = flatten_arrays(state)
    return {n: np.asarray(a).tobytes() for n, a in arrays.items()}, restored.meta["data"]


def lines(path):
    """Return the records of a file without their wall-clock fields."""
    return [
        {name: value for name, value in record.items() if not name.startswith("time/")}
        for record in read_jsonl(path)
    ]


def assert_same_run(path, whole, config_at):
    for name in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl"):
        assert lines(path / name) == lines(whole / name), name
    assert len(lines(path / "metrics.jsonl")) == 4
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (path / "adapter" / name).read_bytes() == (whole / "adapter" / name).read_bytes()
    got = last_checkpoint(path, config_at(path))
    expected = last_checkpoint(whole, config_at(whole))
    assert got[1] == expected[1] == {"epoch": 1, "index": 2}
    assert got[0] == expected[0]
    for part in ("key", "step", "opt_state/", "trainable/adapter/pairs/q_proj/b"):
        assert any(name.startswith(part) for name in got[0]), part


@pytest.mark.parametrize(
    ("stops", "cursor"),
    [([2], (0, 4)), ([1, 1, 1], (1, 0))],
    ids=["2+2", "1+1+1+1, a stop at the end of an epoch"],
)
def test_steps_in_pieces_are_steps_in_one(whole, config_at, tmp_path, stops, cursor):
    config, resume = config_at(tmp_path / "run"), False
    for done, steps in enumerate(stops, start=1):
        result = run_training(config, resume=resume, stop_after=steps, say=lambda line: None)
        assert (result.step, result.finished, result.after) == (sum(stops[:done]), False, None)
        resume = True
    _, data = last_checkpoint(tmp_path / "run", config)
    assert (data["epoch"], data["index"]) == cursor
    said = []
    assert run_training(config, resume=True, say=said.append).finished
    assert said[0] == f"run folder {tmp_path}/run, step {sum(stops)} of 4"
    assert_same_run(tmp_path / "run", whole, config_at)


def test_kill_9_in_a_save_loses_the_steps_since_the_last_one(whole, config_at, tiny_home, tmp_path):
    path = tmp_path / "run"
    killed = python(KILLED, "os.mkdir:2", *arguments(tiny_home, path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = (path / "checkpoints").iterdir()
    assert left.name.startswith("2.orbax-checkpoint-tmp")
    assert len(lines(path / "metrics.jsonl")) == 2
    # Nothing was saved yet, so this starts over; it dies in the save of step 4.
    killed = python(KILLED, "os.rename:4", *arguments(tiny_home, path, "--resume"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "step 0 of 4" in killed.stdout
    names = sorted(p.name.split("-")[0] for p in (path / "checkpoints").iterdir())
    assert names == ["2", "4.orbax"]
    assert len(lines(path / "metrics.jsonl")) == 4
    said = []
    run_training(config_at(path), resume=True, say=said.append)
    assert said[0] == f"run folder {path}, step 2 of 4"
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["2", "4"]
    assert_same_run(path, whole, config_at)


def test_sigterm_saves_and_exits_and_resume_completes(
    whole, config_at, tiny_home, tmp_path, capsys
):
    path = tmp_path / "run"
    stopped = python(TERMINATED, *arguments(tiny_home, path, "--train.checkpoint_every=0"))
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.splitlines()[-1] == (
        f"stopped after step 2 of 4; go on with --resume; run folder {path}"
    )
    assert [p.name for p in (path / "checkpoints").iterdir()] == ["2"]
    assert main(arguments(tiny_home, path, "--resume")) == 0
    assert f"after; run folder {path}\n" in capsys.readouterr().out
    assert_same_run(path, whole, config_at)


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_finished_run_stays_as_it_is(whole, config_at):
    before, said = contents(whole), []
    result = run_training(config_at(whole), resume=True, stop_after=1, say=said.append)
    assert (result.step, result.finished) == (4, True)
    assert contents(whole) == before
    assert said[-1].endswith(f"after; run folder {whole}")
    assert not any("[" in line for line in said)  # no step


def last_error(capsys):
    """Return the error line, which only warnings may precede."""
    *before, last = capsys.readouterr().err.splitlines()
    assert all(line.startswith("qerl: warning: ") for line in before)
    return last


def test_another_config_is_refused_with_its_differences(whole, tiny_home, capsys):
    before = contents(whole)
    flags = ("--resume", "--optimizer.learning_rate=0.1", "--loss.name=dapo", "--data.train_size=5")
    assert main(arguments(tiny_home, whole, *flags)) == 2
    assert last_error(capsys) == (
        f"qerl: error: run_dir: {whole} belongs to another config: data.train_size: 6 -> 5; "
        'loss.name: "grpo" -> "dapo"; optimizer.learning_rate: 0.01 -> 0.1'
    )
    assert contents(whole) == before


def test_a_config_edited_in_the_run_folder_is_refused_too(whole, tiny_home, tmp_path, capsys):
    """The checkpoint holds its config as well."""
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    stored = path / "config.resolved.yaml"
    stored.write_text(stored.read_text().replace("seed: 0", "seed: 1", 1))
    assert main(arguments(tiny_home, path, "--resume", "--seed=1")) == 2
    assert last_error(capsys) == (
        f"qerl: error: run_dir: {path} belongs to another config: seed: 0 -> 1"
    )


def test_what_cannot_change_a_number_may_differ(whole, config_at, tmp_path):
    config = config_at(tmp_path / "run", "--train.checkpoint_every=1", "--train.keep_checkpoints=9")
    run_training(config, stop_after=3, say=lambda line: None)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert len(list((tmp_path / "moved/checkpoints").iterdir())) == 3
    run_training(config_at(tmp_path / "moved"), resume=True, say=lambda line: None)
    assert_same_run(tmp_path / "moved", whole, config_at)


def test_a_run_whose_records_are_gone_says_so(whole, config_at, tmp_path):
    path, said = tmp_path / "run", []
    config = config_at(path)
    run_training(config, stop_after=2, say=lambda line: None)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (path / name).unlink()
    result = run_training(config, resume=True, say=said.append)
    assert said[0] == f"warning: {path}/metrics.jsonl holds 0 of the 2 steps so far"
    assert said[-1].startswith("held-out accuracy not on record before, ")
    assert result.finished and result.before is None
    assert last_checkpoint(path, config)[0] == last_checkpoint(whole, config_at(whole))[0]


def test_a_run_without_a_checkpoint_begins_anew_and_says_so(whole, config_at, tmp_path):
    path, said = tmp_path / "run", []
    config = config_at(path)
    run_training(config, stop_after=2, say=lambda line: None)
    shutil.rmtree(path / "checkpoints")
    run_training(config, resume=True, say=said.append)
    assert said[0] == f"no checkpoint in {path} yet: the run begins anew"
    assert_same_run(path, whole, config_at)


def test_a_run_that_begins_anew_evaluates_anew(whole, config_at, tmp_path):
    """What the first evaluation was made of may have changed in between."""
    path = tmp_path / "run"
    config = config_at(path)
    run_training(config, stop_after=1, say=lambda line: None)
    shutil.rmtree(path / "checkpoints")
    (record,) = read_jsonl(path / "evaluations.jsonl")
    (path / "evaluations.jsonl").write_text(json.dumps({**record, "accuracy": 0.5}) + "\n")
    run_training(config, resume=True, stop_after=1, say=lambda line: None)
    (again,) = read_jsonl(path / "evaluations.jsonl")
    assert again["accuracy"] == record["accuracy"] != 0.5
