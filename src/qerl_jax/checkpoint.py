"""Checkpoints of a run through orbax: state, data cursor and the resolved config, together."""

import hashlib
import json
import logging
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from qerl_jax.data.messages import first_line
from qerl_jax.learner import TrainState
from qerl_jax.tree import flatten_arrays

# The run's key is stored as its raw data: not every orbax release takes typed keys.


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint read back."""

    step: int
    state: TrainState
    meta: Mapping[str, Any]  # data cursor, resolved config, config hash


def open_checkpoints(
    directory: Path, *, max_to_keep: int | None = None, read_only: bool = False
) -> ocp.CheckpointManager:
    """Open the checkpoint folder of a run, clearing what an interrupted save left behind.

    With `read_only` nothing is touched: the run may be under way in another process.
    """
    with _without_warnings() if read_only else nullcontext():
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else max_to_keep,
            create=not read_only,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
        )
        return ocp.CheckpointManager(directory.resolve(), options=options)


@contextmanager
def _without_warnings() -> Iterator[None]:
    # Orbax warns that what was asked to be read-only is read-only.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def save(manager: ocp.CheckpointManager, state: TrainState, meta: Mapping[str, Any]) -> None:
    """Save a checkpoint under its step; complete on disk on return, or absent.

    Orbax writes to a temporary folder and renames it, so a kill in the middle leaves the
    checkpoint before it as the latest one. Raises OSError when it cannot be written.
    """
    step, stored = int(state.step), _storable(state)
    arguments = ocp.args.Composite(
        state=ocp.args.StandardSave(stored),
        meta=ocp.args.JsonSave({**meta, "sha256": _digest(stored, meta)}),
    )
    try:
        manager.save(step, args=arguments)
        manager.wait_until_finished()
    except Exception as error:  # orbax and tensorstore raise kinds of their own
        place = manager.directory / str(step)
        raise OSError(f"{place}: cannot be written ({_reason(error)})") from error


def restore(
    manager: ocp.CheckpointManager, like: TrainState, *, step: int | None = None
) -> Restored | None:
    """Restore the latest checkpoint, or that of `step`; None if there is none.

    `like` gives the tree, shapes and dtypes to restore to; abstract leaves will do.
    Raises ValueError when the step is not there, or cannot be read into that tree.
    """
    step = manager.latest_step() if step is None else step
    if step is None:
        return None
    if step not in manager.all_steps():
        steps = ", ".join(map(str, sorted(manager.all_steps())))
        raise ValueError(f"{manager.directory}: holds no step {step}; there are {steps}")
    items = _read(manager, step, _template(like))
    if not {"data", "config", "sha256"} <= set(items["meta"]):
        raise ValueError(f"{manager.directory / str(step)}: cannot be read (meta is not complete)")
    meta = {name: value for name, value in items["meta"].items() if name != "sha256"}
    if _digest(items["state"], meta) != items["meta"]["sha256"]:
        raise ValueError(f"{manager.directory / str(step)}: is damaged (its sha256 is another)")
    # Orbax ties arrays to a device, new ones are not: programs would compile anew, and differ.
    stored = jax.tree.map(lambda leaf: jnp.array(np.asarray(leaf)), items["state"])
    state = stored.replace(key=jax.random.wrap_key_data(stored.key))
    return Restored(step=step, state=state, meta=meta)


def _digest(state: TrainState, meta: Mapping[str, Any]) -> str:
    """Hash meta and arrays by name, dtype and bytes; orbax reads a changed byte without a word."""
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name, array in flatten_arrays(state).items():
        array = np.ascontiguousarray(array)
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()


def _read(manager: ocp.CheckpointManager, step: int, template: TrainState) -> Mapping[str, Any]:
    try:
        return manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(template), meta=ocp.args.JsonRestore()
            ),
        )
    except Exception as error:  # orbax and tensorstore raise kinds of their own
        place = manager.directory / str(step)
        raise ValueError(f"{place}: cannot be read ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    for cause in ("No space left on device", "Disk quota exceeded", "File too large"):
        if cause in str(error):  # far behind, in tensorstore's messages
            return cause
    return textwrap.shorten(first_line(error), 200, placeholder=" ...")


def _template(like: TrainState) -> TrainState:
    # Without a sharding orbax wants the very devices that the checkpoint was written from.
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        jax.eval_shape(_storable, like),
    )


def _storable(state: TrainState) -> TrainState:
    return state.replace(key=jax.random.key_data(state.key))
