"""Held-out accuracy of an experiment: one way for training, `qerl eval` and notebooks."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import jax

from qerl_jax.data import Prompt
from qerl_jax.evaluate import EvalReport, EvalRow, evaluate
from qerl_jax.experiment import Experiment, sample_prompts
from qerl_jax.lora import Trainable, overlay_norms


def run_evaluation(
    experiment: Experiment,
    trainable: Trainable | None,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> tuple[EvalReport, list[EvalRow]]:
    """Evaluate an adapter (None: the base model) on prompts, without noise, by the eval section."""
    config, settings = experiment.config, experiment.config.eval
    params, adapter = experiment.params, None
    if trainable is not None:
        params, adapter = overlay_norms(params, trainable), trainable.adapter
    tokens = settings.max_completion_tokens or config.rollout.max_completion_tokens
    key = jax.random.key(config.seed)

    def roll_out_fn(batch, sample_ids):
        return sample_prompts(
            experiment,
            params,
            adapter,
            batch,
            key,
            settings=settings,
            max_completion_tokens=tokens,
            sample_ids=sample_ids,
        )

    total = len(prompts) * settings.num_samples
    return evaluate(
        prompts,
        roll_out_fn,
        correct_name=experiment.parts.correct_name,
        num_samples=settings.num_samples,
        batch_size=min(settings.batch_size, total),
        on_batch=lambda done, total: say(f"evaluated {done}/{total}") if total > 512 else None,
    )


def report_record(report: EvalReport) -> dict[str, float]:
    """A report as a JSON record, wall-clock fields marked as such."""
    record = asdict(report)
    for name in ("tokens_per_second", "seconds"):
        record[f"time/{name}"] = record.pop(name)
    return record


def describe_report(report: EvalReport) -> str:
    """One line on an evaluation."""
    distinct = report.num_distinct
    repeated = f" ({distinct} distinct)" if distinct < report.num_problems else ""
    return (
        f"accuracy {report.accuracy:.3f} (95% {report.low:.3f} to {report.high:.3f}, "
        f"{report.num_problems} problems{repeated} x {report.num_samples}), "
        f"length {report.length_mean:.1f}, truncated {report.truncated:.3f}, "
        f"{report.tokens_per_second:.0f} tok/s, {report.seconds:.1f} s"
    )
