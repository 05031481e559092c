"""Checkpoints of a run through orbax: state, data cursor and the resolved config, together."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from qerl_jax.learner import TrainState

# The run's key is stored as its raw data: not every orbax release takes typed keys.


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint read back."""

    step: int
    state: TrainState
    meta: Mapping[str, Any]  # data cursor, resolved config, config hash


def open_checkpoints(directory: Path, *, max_to_keep: int) -> ocp.CheckpointManager:
    """Open the checkpoint folder of a run, clearing what an interrupted save left behind."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=max_to_keep,
        create=True,
        enable_async_checkpointing=False,
        cleanup_tmp_directories=True,
    )
    return ocp.CheckpointManager(directory.resolve(), options=options)


def save(manager: ocp.CheckpointManager, state: TrainState, meta: Mapping[str, Any]) -> None:
    """Save a checkpoint under its step; complete on disk on return, or absent.

    Orbax writes to a temporary folder and renames it, so a kill in the middle leaves the
    checkpoint before it as the latest one.
    """
    manager.save(
        int(state.step),
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(_storable(state)), meta=ocp.args.JsonSave(dict(meta))
        ),
    )
    manager.wait_until_finished()


def restore(
    manager: ocp.CheckpointManager, like: TrainState, *, step: int | None = None
) -> Restored | None:
    """Restore the latest checkpoint, or that of `step`; None if there is none.

    `like` gives the tree, shapes and dtypes to restore to.
    Raises ValueError when the step is not there or the tree does not fit.
    """
    step = manager.latest_step() if step is None else step
    if step is None:
        return None
    if step not in manager.all_steps():
        raise ValueError(f"no checkpoint of step {step}; there are {sorted(manager.all_steps())}")
    template = jax.tree.map(ocp.utils.to_shape_dtype_struct, _storable(like))
    items = manager.restore(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore(template), meta=ocp.args.JsonRestore()
        ),
    )
    stored = items["state"]
    key = jax.random.wrap_key_data(stored.key, impl=jax.random.key_impl(like.key))
    return Restored(step=step, state=stored.replace(key=key), meta=items["meta"])


def _storable(state: TrainState) -> TrainState:
    return state.replace(key=jax.random.key_data(state.key))
