"""The folder of a run: what it holds, when it may be created, resumed or replaced."""

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import jax

from qerl_jax.config import ExperimentConfig
from qerl_jax.config_io import diff_configs, dump_config, load_config
from qerl_jax.metrics import write_atomically

CONFIG = "config.resolved.yaml"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
EVALUATIONS = "evaluations.jsonl"
CHECKPOINTS = "checkpoints"
ADAPTER = "adapter"
LOCK = ".lock"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


def run_path(config: ExperimentConfig) -> Path:
    """Return the folder of a run; ~ is the home folder, as in a shell."""
    return Path(config.run_dir).expanduser()


def check_run(config: ExperimentConfig, *, resume: bool, overwrite: bool) -> None:
    """Refuse a run folder that would be mixed up or lost; touches nothing.

    Raises ValueError, FileExistsError or FileNotFoundError.
    """
    path = run_path(config)
    _check_writable(path)
    holds_run = (path / CONFIG).is_file()
    occupied = path.is_dir() and any(path.iterdir())
    if resume:
        if not holds_run:
            raise FileNotFoundError(f"run_dir: {path} holds no run to resume (no {CONFIG})")
        check_same(config, load_config(path / CONFIG), path)
    elif occupied and not overwrite:
        raise FileExistsError(
            f"run_dir: {path} exists; --resume continues it, --overwrite replaces it"
        )
    elif occupied and not holds_run:
        raise FileExistsError(f"run_dir: {path} is not a run folder (no {CONFIG}), so it stays")
    if (path / LOCK).exists():
        with locked(path):
            pass


def _check_writable(path: Path) -> None:
    """Look at the nearest folder that exists, so that hours of work do not end in an OSError."""
    absolute = path.absolute()
    nearest = next(p for p in (absolute, *absolute.parents) if p.exists())
    if not nearest.is_dir():
        raise FileExistsError(f"run_dir: {path} cannot be a folder: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"run_dir: {path} cannot be written: no permission for {nearest}")


def check_same(config: ExperimentConfig, stored: ExperimentConfig, path: Path) -> None:
    """Refuse to go on with another config than the stored one of the run folder `path`.

    Only what cannot change a number may differ: the folder's name and what is kept or shown.
    Raises ValueError with the list of the differences.
    """
    free = replace(
        stored,
        run_dir=config.run_dir,
        train=replace(
            stored.train,
            checkpoint_every=config.train.checkpoint_every,
            keep_checkpoints=config.train.keep_checkpoints,
            log_samples_every=config.train.log_samples_every,
        ),
    )
    differences = diff_configs(free, config)
    if differences:
        raise ValueError(f"run_dir: {path} belongs to another config: {'; '.join(differences)}")


def create_run(config: ExperimentConfig, *, overwrite: bool) -> Path:
    """Make the run folder with its resolved config and environment; returns its path.

    A run that is replaced is moved aside, and put back on failure; `on_trial` drops it.
    Raises OSError naming run_dir when the folder cannot be written.
    """
    path = run_path(config)
    texts = {CONFIG: dump_config(config), "environment.json": _as_json(environment())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if overwrite and path.exists():
            shutil.rmtree(_aside(path), ignore_errors=True)
            path.rename(_aside(path))
        try:
            path.mkdir(exist_ok=True)
            for name, text in texts.items():
                write_atomically(path / name, text)
        except BaseException:
            _undo(path)
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"run_dir: {path} cannot be written ({reason})") from error
    return path


@contextmanager
def on_trial(path: Path) -> Iterator[Callable[[], None]]:
    """Yield what to call once the new run has a step: it drops the run moved aside.

    A failure before that removes the new run, and puts the old one back if there was one.
    """
    try:
        yield lambda: shutil.rmtree(_aside(path), ignore_errors=True)
    except BaseException:
        _undo(path)
        raise


def _aside(path: Path) -> Path:
    return path.absolute().with_name(f".{path.absolute().name}.replaced")


def _undo(path: Path) -> None:
    replaces = _aside(path).exists()
    if replaces or not (path / METRICS).exists():
        shutil.rmtree(path, ignore_errors=True)
    if replaces:
        _aside(path).rename(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the run folder for this process; the lock goes with it, however it ends.

    Raises ValueError when another process holds it.
    """
    with (path / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"run_dir: {path} is in use by another process") from None
        yield


def _as_json(value: dict[str, str]) -> str:
    return json.dumps(value, indent=2) + "\n"


def environment() -> dict[str, str]:
    """Versions and device that a run was made with."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": f"{device.platform}: {device.device_kind}",
        "devices": str(jax.device_count()),
        **versions,
    }
