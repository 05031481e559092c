"""The folder of a run: what it holds, when it may be created, resumed or replaced."""

import itertools
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

from qerl_jax.base_model import model_path
from qerl_jax.config import ExperimentConfig
from qerl_jax.config_io import diff_configs, dump_config, load_config
from qerl_jax.metrics import write_atomically
from qerl_jax.run_lock import LOCK, lock_file, locked, naming

CONFIG = "config.resolved.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
EVALUATIONS = "evaluations.jsonl"
CHECKPOINTS = "checkpoints"
ADAPTER = "adapter"
_OWN = (CONFIG, ENVIRONMENT, METRICS, SAMPLES, EVALUATIONS, CHECKPOINTS, ADAPTER, LOCK)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


def run_path(config: ExperimentConfig) -> Path:
    """Return the folder of a run; ~ is the home folder, links are followed."""
    path = Path(os.path.expanduser(config.run_dir))
    indirect = path.is_symlink() or ".." in path.parts
    return Path(os.path.realpath(path)) if indirect else path


def check_run(config: ExperimentConfig, *, resume: bool, overwrite: bool) -> None:
    """Refuse a run folder that would be mixed up or lost; touches nothing.

    Raises ValueError, FileExistsError or FileNotFoundError.
    """
    path = run_path(config)
    _check_writable(path)
    if lock_file(path).exists():
        with locked(path):
            pass
    _check_contents(config, path, resume=resume, overwrite=overwrite)


def _check_contents(config: ExperimentConfig, path: Path, *, resume: bool, overwrite: bool) -> None:
    holds_run = (path / CONFIG).is_file()
    occupied = path.is_dir() and not _is_empty(path)
    if resume:
        if not holds_run:
            raise FileNotFoundError(f"run_dir: {path} holds no run to resume (no {CONFIG})")
        if (path / CHECKPOINTS).exists() and not (path / CHECKPOINTS).is_dir():
            raise FileExistsError(f"run_dir: {path / CHECKPOINTS} is not a folder")
        check_same(config, load_config(path / CONFIG), path)
    elif occupied and not overwrite:
        before = f" (the run before it lies in {_aside(path)})" if _aside(path).exists() else ""
        raise FileExistsError(
            f"run_dir: {path} exists; --resume continues it, --overwrite replaces it{before}"
        )
    elif occupied and not holds_run:
        raise FileExistsError(f"run_dir: {path} is not a run folder (no {CONFIG}), so it stays")
    elif _aside(path).exists() and not overwrite:
        raise FileExistsError(
            f"run_dir: {_aside(path)} holds the run that an --overwrite which was killed would "
            "have replaced; move it, or repeat --overwrite"
        )
    for parent in _realpath(path).parents:
        if not resume and is_run(parent):
            raise FileExistsError(f"run_dir: {path} lies in another run, {parent}")
    if occupied and overwrite:
        _check_replaceable(config, path)


def _check_replaceable(config: ExperimentConfig, path: Path) -> None:
    """Refuse to replace a run folder that holds what would be missed."""
    read = {
        "lora.init_from": config.lora.init_from,
        "model.path": str(model_path(config.model.path)),  # "tiny" is no folder here
        "data.train_path": config.data.train_path,
        "data.eval_path": config.data.eval_path,
    }
    for name, value in read.items():
        if value and _realpath(path) in (_realpath(value), *_realpath(value).parents):
            raise ValueError(f"{name}: {value} lies in the run that --overwrite replaces")
    for file in path.rglob(CONFIG):
        if file.parent != path and is_run(file.parent):
            raise FileExistsError(
                f"run_dir: {path} stays, as another run lies in it, {file.parent}"
            )


def is_run(path: Path) -> bool:
    """Tell a run folder from one that holds a copy of a run's config."""
    return (path / CONFIG).is_file() and (path / ENVIRONMENT).is_file()


def _realpath(path: str | Path) -> Path:
    return Path(os.path.realpath(os.path.expanduser(path)))


def _check_writable(path: Path) -> None:
    """Look at the nearest folder that exists, so that hours of work do not end in an OSError."""
    absolute = path.absolute()
    nearest = next(p for p in (absolute, *absolute.parents) if p.exists())
    if not nearest.is_dir():
        raise FileExistsError(f"run_dir: {path} cannot be a folder: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"run_dir: {path} cannot be written: no permission for {nearest}")


def has_checkpoint(config: ExperimentConfig) -> bool:
    """Tell whether the run has a whole checkpoint; temporary ones have other names."""
    return any(p.name.isdecimal() for p in (run_path(config) / CHECKPOINTS).glob("*"))


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


@contextmanager
def open_run(
    config: ExperimentConfig, *, resume: bool = False, overwrite: bool = False
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Hold the run folder, made anew unless `resume`, for this process.

    Yields its path and what to call once a step is on disk. A failure before that removes what
    is new. A run that is replaced lies aside until then, and is put back on failure.

    Raises ValueError or OSError as `check_run`, or when the folder cannot be written.
    """
    path, aside = run_path(config), _aside(run_path(config))
    has_step = False

    def prove() -> None:
        nonlocal has_step
        if not has_step and aside.exists():
            _discard(aside, to=path)
        has_step = True

    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        _check_contents(config, path, resume=resume, overwrite=overwrite)
        with naming(path):
            was_empty = path.is_dir() and _is_empty(path)
            if not resume and not was_empty and path.exists():
                _move_aside(path)
        try:
            if not resume:
                with naming(path):
                    _create(config, path)
            yield path, prove
        except BaseException:
            if not (resume or has_step):
                _withdraw(path, keep_folder=was_empty)
                if aside.exists():
                    if path.exists():  # and holds what is not the run's
                        _discard(path, to=aside)
                    aside.rename(path)
            raise


def _move_aside(path: Path) -> None:
    if _aside(path).exists() and not (path / METRICS).exists():
        # An --overwrite was killed before its first step: the run to keep lies aside already.
        _discard(path, to=_aside(path))
    else:
        if _aside(path).exists():
            _discard(_aside(path), to=path)
        path.rename(_aside(path))


def _discard(folder: Path, *, to: Path) -> None:
    """Remove what a run wrote, and the folder; whatever else lies in it is moved.

    Where its name is taken there, it gets ".1", ".2" and so on behind it.
    """
    for child in folder.iterdir():
        if is_own(child.name):
            _remove(child)
        else:
            names = (f"{child.name}.{i}" if i else child.name for i in itertools.count())
            child.rename(to / next(name for name in names if not os.path.lexists(to / name)))
    folder.rmdir()


def is_own(name: str) -> bool:
    """Tell whether a run writes files of this name into its folder, temporary ones included."""
    return name in _OWN or name.startswith(tuple(f".{own}." for own in _OWN))


def _create(config: ExperimentConfig, path: Path) -> None:
    versions = json.dumps(environment(), indent=2) + "\n"
    texts = {CONFIG: dump_config(config), ENVIRONMENT: versions}
    path.mkdir(exist_ok=True)
    for name, text in texts.items():
        write_atomically(path / name, text)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _withdraw(path: Path, *, keep_folder: bool) -> None:
    """Remove what a run has written, and the folder if nothing else came into it."""
    for child in path.iterdir() if path.is_dir() else ():
        if is_own(child.name):
            _remove(child)
    if path.is_dir() and not keep_folder and not any(path.iterdir()):
        path.rmdir()


def _aside(path: Path) -> Path:
    return path.absolute().with_name(f".{path.absolute().name}.replaced")


def _is_empty(path: Path) -> bool:
    # The first file may have been cut off under its temporary name.
    return all(child.name.startswith(".") and is_own(child.name) for child in path.iterdir())


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
