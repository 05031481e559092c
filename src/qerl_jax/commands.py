"""What the other subcommands of `qerl` do; cli.py parses, this runs."""

import dataclasses
import os
import sys
from functools import partial
from pathlib import Path

import jax

from qerl_jax import checkpoint, run_folder
from qerl_jax.base_model import load_weights, model_path, open_model
from qerl_jax.config import ExperimentConfig
from qerl_jax.config_io import load_config
from qerl_jax.config_warnings import config_warnings
from qerl_jax.experiment import build_experiment, open_experiment_model
from qerl_jax.held_out import describe_report, report_record, run_evaluation
from qerl_jax.inference import generate, score
from qerl_jax.metrics import write_lines
from qerl_jax.models import abstract_params
from qerl_jax.models.convert import convert_gguf
from qerl_jax.models.hf import read_config, save_nvfp4
from qerl_jax.output import check_output
from qerl_jax.parts import build_optimizer
from qerl_jax.peft import export_adapter as write_adapter
from qerl_jax.peft import import_adapter
from qerl_jax.plan import describe_plan
from qerl_jax.state import init_state
from qerl_jax.train import run_training
from qerl_jax.tree import num_bytes

__all__ = [
    "convert",
    "evaluate",
    "export_adapter",
    "generate",
    "quantize",
    "score",
    "train",
]


def train(
    config: ExperimentConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    stop_after: int | None = None,
    quiet: bool = False,
) -> None:
    """Train, or with dry_run check everything that can be checked without weights."""
    if dry_run:
        run_folder.check_run(config, resume=resume, overwrite=overwrite)
        plan = describe_plan(build_experiment(config, load=False))
        _warn(config)
        print(plan)
        return
    say = (lambda line: None) if quiet else lambda line: print(line, flush=True)
    result = run_training(
        config,
        resume=resume,
        overwrite=overwrite,
        stop_after=stop_after,
        say=say,
        begin=partial(_warn, config),
    )
    if quiet:
        print(result.run_dir)


def _warn(config: ExperimentConfig) -> None:
    for warning in config_warnings(config):
        print(f"qerl: warning: {warning}", file=sys.stderr)


def evaluate(
    config: ExperimentConfig,
    *,
    adapter: str | None = None,
    split: str = "eval",
    limit: int | None = None,
    out: str | None = None,
    config_file: str | None = None,
) -> None:
    """Evaluate the base model, or an adapter on it, with the config's eval section.

    `config_file`: where the config was read from; `out` must not replace it.
    """
    if out is not None:
        sources = {
            "eval": config_file,
            "data.train_path": config.data.train_path,
            "data.eval_path": config.data.eval_path,
            "model.path": str(model_path(config.model.path)),
            "--adapter": adapter,
        }
        check_output(out, sources=sources)
    trainable = None
    if adapter is not None:  # before the weights are read
        folder = open_model(
            config.model.path, dtype=config.model.compute_dtype, text=False, field="model.path"
        )
        trainable = import_adapter(adapter, abstract_params(folder.config), field="--adapter")
    experiment = build_experiment(config)
    prompts = experiment.eval_prompts if split == "eval" else experiment.train_prompts
    dropped = experiment.eval_dropped if split == "eval" else experiment.dropped
    if dropped:
        print(f"{dropped} problems are longer than data.max_prompt_tokens and left out")
    report, rows = run_evaluation(experiment, trainable, prompts[:limit], print)
    print(f"{adapter or 'base model'}: {describe_report(report)}")
    if out is not None:
        lines = [{"report": report_record(report)}, *(dataclasses.asdict(row) for row in rows)]
        write_lines(out, lines)


def quantize(*, model: str, out: str, scale_rounding: str) -> None:
    """Write a model folder's NVFP4 twin in the compressed-tensors format."""
    if os.path.lexists(out):
        raise FileExistsError(f"--out: {out} exists")
    folder = open_model(model, dtype="float32", text=False)
    if read_config(folder.path).get("quantization_config") is not None:
        raise ValueError(f"--model: {model} is quantized already")
    params = load_weights(folder, quantize=True, scale_rounding=scale_rounding)
    save_nvfp4(out, folder.path, params, folder.config)
    print(f"{out}: {num_bytes(params) / 2**20:.1f} MiB")


def convert(*, gguf: str, out: str, tie: bool) -> None:
    """Convert a GGUF file into a Hugging Face folder."""
    convert_gguf(gguf, out, tie=tie)
    print(out)


def export_adapter(*, run_dir: str, out: str, step: int | None) -> None:
    """Write a checkpoint of a run as a PEFT adapter."""
    path = Path(run_dir)
    if os.path.lexists(out):
        raise FileExistsError(f"{out}: exists")
    if not (path / run_folder.CONFIG).is_file():
        raise FileNotFoundError(f"{run_dir}: is not a run folder (no {run_folder.CONFIG})")
    config = load_config(path / run_folder.CONFIG)
    shapes = abstract_params(open_experiment_model(config).config)
    make_state = partial(init_state, config, build_optimizer(config), read_init_from=False)
    state = jax.eval_shape(make_state, shapes)
    manager = checkpoint.open_checkpoints(path / run_folder.CHECKPOINTS, read_only=True)
    restored = checkpoint.restore(manager, state, step=step)
    if restored is None:
        raise FileNotFoundError(f"{run_dir}: holds no checkpoint")
    write_adapter(out, restored.state.trainable, base_model=config.model.path)
    print(f"{out}: adapter of step {restored.step}")
