"""The host loop: steps, evaluation, checkpoints, logs, and a clean stop at any time."""

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from qerl_jax import checkpoint, run_folder
from qerl_jax.config import ExperimentConfig
from qerl_jax.config_io import config_hash, dump_config, parse_config
from qerl_jax.data import DataState
from qerl_jax.experiment import Experiment, build_experiment
from qerl_jax.held_out import describe_report, report_record, run_evaluation
from qerl_jax.learner import TrainState
from qerl_jax.lora import Trainable
from qerl_jax.metrics import (
    append_jsonl,
    console_line,
    keep_steps,
    read_jsonl,
    remaining_seconds,
    sample_text,
)
from qerl_jax.peft import export_adapter
from qerl_jax.rollout import Rollout
from qerl_jax.state import init_state
from qerl_jax.step import train_step
from qerl_jax.tree import fingerprint, num_bytes, num_elements

Say = Callable[[str], None]
_START = DataState(epoch=0, index=0)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a call of run_training ended."""

    run_dir: Path
    step: int
    finished: bool  # False: stopped by a signal or by stop_after
    before: float | None  # held-out accuracy
    after: float | None


def run_training(
    config: ExperimentConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    stop_after: int | None = None,
    say: Say = print,
    begin: Callable[[], None] = lambda: None,
) -> TrainResult:
    """Train as the config says, or go on from the latest checkpoint.

    SIGTERM or SIGINT saves a checkpoint after the step under way and returns; so does
    `stop_after` (steps of this call). A resumed run gives the same numbers as one that was
    never stopped. `begin` is called when all checks are done. Raises ValueError or OSError,
    before anything is written, for bad input.
    """
    run_folder.check_run(config, resume=resume, overwrite=overwrite)
    experiment = build_experiment(config)
    # A checkpoint holds the adapter that init_from gave, which may be gone by then.
    saved = resume and run_folder.has_checkpoint(config)
    state = init_state(
        config, experiment.parts.optimizer, experiment.params, read_init_from=not saved
    )
    begin()
    with run_folder.open_run(config, resume=resume, overwrite=overwrite) as (path, proved):
        manager = checkpoint.open_checkpoints(
            path / run_folder.CHECKPOINTS, max_to_keep=config.train.keep_checkpoints
        )
        cursor = _START
        if resume:
            state, cursor = _restore(experiment, state, path, manager, say)
        say(f"run folder {path}, step {int(state.step)} of {config.train.total_steps}")
        say(_describe(experiment, state.trainable))
        with stop_signals() as stopped:
            state = _loop(
                experiment, state, cursor, path, manager, stop_after, stopped, proved, say
            )
        manager.close()
        try:
            return _finish(experiment, state, path, say)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; --resume goes on") from None


def _restore(experiment, state, path, manager, say):
    """Return (state, data cursor) of the last checkpoint, or of step 0 if there is none."""
    cursor, restored = _START, checkpoint.restore(manager, state)
    if restored:
        run_folder.check_same(experiment.config, parse_config(restored.meta["config"]), path)
        if restored.meta.get("prompts") != _prompts_hash(experiment):
            raise ValueError(
                f"data: the training or held-out prompts are not those that {path} began with"
            )
        if restored.meta.get("model") != _model_hash(experiment):
            raise ValueError(f"model.path: the model is not the one that {path} began with")
        state, cursor = restored.state, DataState(**restored.meta["data"])
    first = int(state.step)
    for name in (run_folder.METRICS, run_folder.SAMPLES, run_folder.EVALUATIONS):
        # Without a checkpoint nothing vouches for what a first evaluation was made of.
        keep_steps(path / name, first if restored else -1)
    recorded = len(read_jsonl(path / run_folder.METRICS))
    if recorded != first:
        say(f"warning: {path / run_folder.METRICS} holds {recorded} of the {first} steps so far")
    if restored is None:
        say(f"no checkpoint in {path} yet: the run begins anew")
    return state, cursor


def _loop(experiment, state, cursor, path, manager, stop_after, stopped, proved, say):
    """Run the remaining steps; returns the last state."""
    config, first, ends = experiment.config, int(state.step), []
    total = config.train.total_steps
    last = total if stop_after is None else min(total, first + stop_after)
    if first == 0:
        _evaluate_once(experiment, state, path, say)
    for step in range(first + 1, last + 1):
        state, cursor, record, rollout = train_step(experiment, state, cursor)
        append_jsonl(path / run_folder.METRICS, record)
        proved()
        ends.append(time.perf_counter())
        eta = remaining_seconds(ends, steps_left=total - step)
        say(console_line(record, total_steps=total, eta_seconds=eta))
        if _due(config.train.log_samples_every, step):
            say(_log_sample(experiment, path, step, rollout))
        if _due(config.eval.every, step):
            _evaluate_once(experiment, state, path, say)
        over = stopped.is_set() or step == last
        if over or _due(config.train.checkpoint_every, step):
            checkpoint.save(manager, state, _checkpoint_meta(experiment, cursor))
        if over:
            break
    return state


def _prompts_hash(experiment: Experiment) -> str:
    """Name the prompts: in another list the data cursor and the accuracies would mean others."""
    lists = (experiment.train_prompts, experiment.eval_prompts)
    texts = [[[list(prompt.ids), prompt.answer] for prompt in prompts] for prompts in lists]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _model_hash(experiment: Experiment) -> str:
    """Name the frozen weights, how the model computes with them, and the tokens that end a text."""
    model = experiment.model
    parts = (fingerprint(experiment.params), model.config, model.end_ids, model.pad_id)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _checkpoint_meta(experiment: Experiment, cursor: DataState) -> dict[str, Any]:
    config = experiment.config
    return {
        "data": asdict(cursor),
        "prompts": _prompts_hash(experiment),
        "model": _model_hash(experiment),
        "config": dump_config(config),
        "config_hash": config_hash(config),
    }


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set, saying so; a second signal acts as usual.

    Python delivers signals to the main thread only: elsewhere the event is never set.
    """
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}

    def stop(number, _frame):
        stopped.set()
        # Not print: a handler may run inside of one.
        os.write(2, b"qerl: saves and stops after this step; a second signal stops at once\n")
        signal.signal(number, before[number])

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def _evaluate_once(experiment: Experiment, state: TrainState, path: Path, say: Say) -> None:
    """Evaluate and record the accuracy of a step, unless it is on record."""
    records, step = path / run_folder.EVALUATIONS, int(state.step)
    if any(record["step"] == step for record in read_jsonl(records)):
        return
    report, _ = run_evaluation(experiment, state.trainable, experiment.eval_prompts, say)
    append_jsonl(records, {"step": step, **report_record(report)})
    say(f"step {step}: held-out {describe_report(report)}")


def _log_sample(experiment: Experiment, path: Path, step: int, rollout: Rollout) -> str:
    """Write a group of a step to samples.jsonl; returns its first sample as readable text."""
    tokenizer = experiment.model.tokenizer
    for row in range(experiment.config.rollout.num_generations):
        prompt = tokenizer.decode(rollout.prompt_ids[row][rollout.prompt_mask[row]])
        sample = {
            "step": step,
            "prompt": prompt,
            "completion": rollout.texts[row],
            "reward": float(rollout.rewards[row]),
            **{name: float(values[row]) for name, values in rollout.reward_parts.items()},
            "tokens": int(rollout.lengths[row]),
            "finished": bool(rollout.finished[row]),
        }
        append_jsonl(path / run_folder.SAMPLES, sample)
        if row == 0:
            first = sample_text(prompt, rollout.texts[0], sample["reward"])
    return first


def _describe(experiment: Experiment, trainable: Trainable) -> str:
    return (
        f"base {num_bytes(experiment.params) / 2**20:.1f} MiB, "
        f"{num_elements(trainable):,} trained parameters, "
        f"{len(experiment.train_prompts)} training and {len(experiment.eval_prompts)} held-out "
        f"prompts ({experiment.dropped} and {experiment.eval_dropped} too long are left out), "
        f"right is what {experiment.parts.correct_name} gives 1, {jax.devices()[0].device_kind}"
    )


def _finish(experiment: Experiment, state: TrainState, path: Path, say: Say) -> TrainResult:
    """Evaluate and export a run that is complete; say how it ended."""
    step, total = int(state.step), experiment.config.train.total_steps
    if step == total:
        _evaluate_once(experiment, state, path, say)
        export_adapter(
            path / run_folder.ADAPTER,
            state.trainable,
            base_model=experiment.config.model.path,
            replace=True,
        )
    records = read_jsonl(path / run_folder.EVALUATIONS)
    accuracy = {record["step"]: record.get("accuracy") for record in records}
    before, after = accuracy.get(0), accuracy.get(total)
    if step == total:
        first, last = ("not on record" if a is None else f"{a:.3f}" for a in (before, after))
        say(f"held-out accuracy {first} before, {last} after; run folder {path}")
    else:
        say(f"stopped after step {step} of {total}; go on with --resume; run folder {path}")
    return TrainResult(run_dir=path, step=step, finished=step == total, before=before, after=after)
