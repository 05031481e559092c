"""The run folder: when it may be made, resumed or replaced, and that a refusal leaves it alone."""

import contextlib
import dataclasses
import json
import os
import re
import shutil

import pytest

from qerl_jax import run_folder
from qerl_jax.config import DataConfig, ExperimentConfig, LoraConfig, TrainConfig
from qerl_jax.config_io import load_config
from qerl_jax.run_folder import (
    CONFIG,
    check_run,
    check_same,
    environment,
    open_run,
)
from qerl_jax.run_lock import locked


def config_at(path, **changes):
    return ExperimentConfig(run_dir=str(path), **changes)


def create_run(config, *, overwrite):
    with open_run(config, overwrite=overwrite) as (path, _):
        return path


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run of the default config, with a file in it."""
    path = create_run(config_at(tmp_path / "run"), overwrite=False)
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    return path


def refusal(config, *, resume=False, overwrite=False):
    with pytest.raises((ValueError, OSError)) as error:
        check_run(config, resume=resume, overwrite=overwrite)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_new_run_folder_holds_its_config_and_environment(tmp_path):
    config = config_at(tmp_path / "a/b/run", seed=7)
    check_run(config, resume=False, overwrite=False)
    path = create_run(config, overwrite=False)
    assert load_config(path / CONFIG) == config
    assert json.loads((path / "environment.json").read_text()) == environment()
    assert {"jax", "python", "device"} <= set(environment())


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert create_run(config_at("~/runs/a"), overwrite=False) == tmp_path / "runs/a"
    assert refusal(config_at("~/runs/a")) == (
        f"run_dir: {tmp_path}/runs/a exists; --resume continues it, --overwrite replaces it"
    )


def test_checking_touches_nothing(tmp_path):
    check_run(config_at(tmp_path / "a/run"), resume=False, overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_used_as_it_is(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    before = path.stat().st_ino
    check_run(config_at(path), resume=False, overwrite=False)
    create_run(config_at(path), overwrite=False)
    assert path.stat().st_ino == before  # it may be a mount point or somebody's working folder


def test_a_folder_in_use_is_refused(run):
    assert refusal(config_at(run)) == (
        f"run_dir: {run} exists; --resume continues it, --overwrite replaces it"
    )


def test_overwrite_spares_what_is_not_a_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    assert refusal(config_at(tmp_path), overwrite=True) == (
        f"run_dir: {tmp_path} is not a run folder (no {CONFIG}), so it stays"
    )


def test_resume_needs_a_run(tmp_path):
    assert refusal(config_at(tmp_path / "no"), resume=True) == (
        f"run_dir: {tmp_path / 'no'} holds no run to resume (no {CONFIG})"
    )


def test_resume_refuses_another_config_with_every_difference(run):
    changed = config_at(run, seed=3, train=TrainConfig(total_steps=7))
    assert refusal(changed, resume=True) == (
        f"run_dir: {run} belongs to another config: seed: 0 -> 3; train.total_steps: 100 -> 7"
    )


FREE = {"checkpoint_every": 1, "keep_checkpoints": 9, "log_samples_every": 0}


def test_resume_allows_what_cannot_change_a_number(run):
    moved = run.rename(run.with_name("moved"))
    check_run(config_at(moved, train=TrainConfig(**FREE)), resume=True, overwrite=False)


CHANGES = {
    "seed": 1,
    "model": {"path": "b"},
    "quant": {"format": "none"},
    "lora": {"rank": 8},
    "aqn": {"enabled": False},
    "data": {"data_seed": 1},
    "rollout": {"temperature": 0.5},
    "reward": {"weights": (2.0,)},
    "loss": {"beta": 0.1},
    "optimizer": {"learning_rate": 1e-3},
    "train": {"total_steps": 7},
    "eval": {"every": 5},
}


def test_every_section_has_a_change_below():
    assert {"run_dir", *CHANGES} == {f.name for f in dataclasses.fields(ExperimentConfig)}


@pytest.mark.parametrize("section", CHANGES)
def test_every_section_counts(section, tmp_path):
    stored, change = config_at(tmp_path), CHANGES[section]
    if isinstance(change, dict):
        change = dataclasses.replace(getattr(stored, section), **change)
    changed = dataclasses.replace(stored, **{section: change})
    with pytest.raises(ValueError, match=re.escape(f"another config: {section}")):
        check_same(changed, stored, tmp_path)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("below", ["", "/run", "/a/b/run"])
def test_a_path_through_a_file_is_refused_before_any_work(tmp_path, below, resume):
    file = tmp_path / "file"
    file.write_text("x")
    message = refusal(config_at(f"{file}{below}"), resume=resume)
    assert message == f"run_dir: {file}{below} cannot be a folder: {file} is a file"


def test_no_permission_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    message = refusal(config_at(tmp_path / "a/run"))
    assert message == f"run_dir: {tmp_path}/a/run cannot be written: no permission for {tmp_path}"


def test_a_path_that_turns_bad_meanwhile_is_one_line(tmp_path):
    config = config_at(tmp_path / "a/run")
    check_run(config, resume=False, overwrite=False)
    (tmp_path / "a").write_text("x")
    with pytest.raises(OSError) as error:
        create_run(config, overwrite=False)
    assert re.fullmatch(
        rf"run_dir: {tmp_path}/a/run cannot be written \([\w ]+\)", str(error.value)
    )


def test_overwrite_leaves_only_the_new_run(run):
    with open_run(config_at(run, seed=9), overwrite=True) as (_, proved):
        assert [p.name for p in run.parent.iterdir() if p.name.endswith(".replaced")]
        proved()
    assert {str(p) for p in contents(run)} == {CONFIG, "environment.json"}
    assert load_config(run / CONFIG).seed == 9
    assert [p.name for p in run.parent.iterdir()] == ["run"]


def interrupt(config, *, after_step=False, **settings):
    with pytest.raises(KeyboardInterrupt), open_run(config, **settings) as (path, proved):
        if after_step:
            (path / "metrics.jsonl").write_text('{"step": 1}\n')
            proved()
        raise KeyboardInterrupt


def test_a_new_run_that_fails_before_its_first_step_puts_the_old_one_back(run):
    before = contents(run)
    interrupt(config_at(run, seed=9), overwrite=True)
    assert contents(run) == before
    assert [p.name for p in run.parent.iterdir()] == ["run"]


def test_a_new_run_that_fails_after_its_first_step_stays(run):
    interrupt(config_at(run, seed=9), after_step=True, overwrite=True)
    assert load_config(run / CONFIG).seed == 9
    assert [p.name for p in run.parent.iterdir()] == ["run"]


def test_a_new_run_that_fails_before_its_first_step_leaves_no_folder(tmp_path):
    interrupt(config_at(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    interrupt(config_at(tmp_path / "run"))
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]  # it was there


def test_a_resumed_run_that_fails_stays(run):
    before = contents(run)
    interrupt(config_at(run), resume=True)
    assert contents(run) == before


def test_two_killed_replacements_do_not_cost_the_run(run):
    before, aside = contents(run), run.parent / ".run.replaced"
    for seed in (8, 9):
        create_run(config_at(run, seed=seed), overwrite=True)  # as if killed: neither proved
        assert contents(aside) == before
    interrupt(config_at(run, seed=9), overwrite=True)
    assert contents(run) == before and not aside.exists()


def test_what_no_run_wrote_outlives_a_replacement(run):
    """Notes, a loss, a config of the user's own may lie in the folder of a run."""
    (run / "notes").mkdir()
    (run / "notes" / "one.md").write_text("mine")
    (run / "my_losses.py").write_text("mine")
    (run / ".metrics.jsonl.x1").write_text("left by a write that was cut off")
    before = contents(run)
    with pytest.raises(RuntimeError), open_run(config_at(run, seed=8), overwrite=True):
        raise RuntimeError
    assert contents(run) == before
    with open_run(config_at(run, seed=8), overwrite=True) as (_, proved):
        (run / "metrics.jsonl").write_text('{"step": 1}\n')
        proved()
    assert {str(p) for p in contents(run)} == {
        *(CONFIG, "environment.json", "metrics.jsonl", "my_losses.py", "notes/one.md")
    }
    assert not (run.parent / ".run.replaced").exists() and load_config(run / CONFIG).seed == 8


def test_what_came_into_a_new_folder_outlives_its_failure(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(RuntimeError), open_run(config_at(path)):
        (path / "notes.md").write_text("mine")
        raise RuntimeError
    assert {str(p) for p in contents(path)} == {"notes.md"}


@pytest.mark.parametrize("fails", [False, True], ids=["replaced", "put back"])
def test_files_of_one_name_in_the_old_and_the_new_folder(run, fails):
    (run / "notes.md").write_text("old")
    with contextlib.suppress(RuntimeError), open_run(config_at(run), overwrite=True) as (_, proved):
        (run / "notes.md").write_text("new")
        if fails:
            raise RuntimeError
        proved()
    found = {name: (run / name).read_text() for name in ("notes.md", "notes.md.1")}
    first, second = ("old", "new") if fails else ("new", "old")
    assert found == {"notes.md": first, "notes.md.1": second}
    assert [p.name for p in run.parent.iterdir()] == ["run"]
    create_run(config_at(run), overwrite=True)


def test_a_folder_whose_first_file_was_cut_off_is_empty(run):
    aside = run.parent / ".run.replaced"
    before = contents(run)
    run.rename(aside)
    run.mkdir()
    (run / ".config.resolved.yaml.x1").write_text("seed")
    with pytest.raises(RuntimeError), open_run(config_at(run), overwrite=True):
        raise RuntimeError
    assert contents(run) == before and not aside.exists()


def test_what_a_killed_replacement_left_aside_is_not_forgotten(run):
    before, aside = contents(run), run.parent / ".run.replaced"
    create_run(config_at(run, seed=8), overwrite=True)
    with open_run(config_at(run, seed=8), resume=True) as (_, proved):
        assert contents(aside) == before
        proved()
    assert not aside.exists()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    create_run(config_at(run, seed=9), overwrite=True)
    shutil.rmtree(run)
    assert refusal(config_at(run)).startswith(f"run_dir: {aside} holds the run that an --overwrite")


def test_a_link_to_a_folder_elsewhere_is_followed(run):
    link = run.parent / "runs"
    link.symlink_to(run)
    interrupt(config_at(link, seed=9), after_step=True, overwrite=True)
    assert link.is_symlink() and load_config(run / CONFIG).seed == 9
    assert sorted(p.name for p in run.parent.iterdir()) == ["run", "runs"]


def test_dots_do_not_reach_a_folder_that_is_in_use(tmp_path):
    (tmp_path / "precious").write_text("x")
    path = tmp_path / "new" / ".."
    assert refusal(config_at(path)).startswith(f"run_dir: {tmp_path} exists; ")


def test_an_adapter_inside_the_run_to_be_replaced(run):
    config = config_at(run, lora=LoraConfig(init_from=f"{run}/adapter"))
    message = refusal(config, overwrite=True)
    assert message == f"lora.init_from: {run}/adapter lies in the run that --overwrite replaces"


@pytest.mark.parametrize("field", ["train_path", "eval_path"])
def test_data_inside_the_run_to_be_replaced(run, field):
    data = DataConfig(source="jsonl", **{field: f"{run}/data.jsonl"})
    message = refusal(config_at(run, data=data), overwrite=True)
    assert message == f"data.{field}: {run}/data.jsonl lies in the run that --overwrite replaces"


def test_a_run_inside_another(run):
    message = refusal(config_at(run / "deep" / "child"))
    assert message == f"run_dir: {run}/deep/child lies in another run, {run}"
    (run / "deep").mkdir()
    (run / "deep" / CONFIG).write_text("")  # a copy of a config alone is no run
    check_run(config_at(run), resume=False, overwrite=True)
    (run / "deep" / "environment.json").write_text("{}")
    message = refusal(config_at(run), overwrite=True)
    assert message == f"run_dir: {run} stays, as another run lies in it, {run}/deep"


def test_checkpoints_that_are_no_folder(run):
    (run / "checkpoints").write_text("")
    message = refusal(config_at(run), resume=True)
    assert message == f"run_dir: {run}/checkpoints is not a folder"


def test_a_mount_point_in_a_folder_of_others_is_used(tmp_path, monkeypatch):
    path, access = tmp_path / "mount", os.access
    path.mkdir()
    monkeypatch.setattr(os, "access", lambda p, mode: p != tmp_path and access(p, mode))
    with open_run(config_at(path)) as (_, proved):
        assert [p.name for p in tmp_path.iterdir()] == ["mount"]
        assert refusal(config_at(path), resume=True).endswith("is in use by another process")
        proved()
    assert {str(p) for p in contents(path)} == {CONFIG, "environment.json"}


def test_of_two_processes_at_once_one_makes_the_run(tmp_path):
    with open_run(config_at(tmp_path / "run", seed=1)):
        for settings in ({}, {"overwrite": True}):
            with (
                pytest.raises(ValueError, match="is in use by another process"),
                open_run(config_at(tmp_path / "run", seed=2), **settings),
            ):
                raise AssertionError
    assert load_config(tmp_path / "run" / CONFIG).seed == 1


def test_a_folder_serves_one_process(run):
    with locked(run):
        for settings in ({"resume": True}, {"overwrite": True}):
            message = refusal(config_at(run), **settings)
            assert message == f"run_dir: {run} is in use by another process"
    check_run(config_at(run), resume=True, overwrite=False)


def test_a_replacement_that_fails_puts_the_old_run_back(run, monkeypatch):
    before = contents(run)
    written = []

    def disk_full(path, text):
        if written:
            raise OSError(28, "No space left on device")
        written.append(path.write_text(text))

    monkeypatch.setattr(run_folder, "write_atomically", disk_full)
    with pytest.raises(OSError, match=r"run_dir: .* cannot be written \(No space left on device\)"):
        create_run(config_at(run, seed=9), overwrite=True)
    assert written and contents(run) == before
    assert [p.name for p in run.parent.iterdir()] == ["run"]
