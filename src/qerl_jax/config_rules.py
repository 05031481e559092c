"""What values a config may hold: bounds of each number, and rules between fields.

Names in closed tables (losses, advantages, rewards, noise schedules) are checked by the
composition root, which knows the tables; only the form of `module:function` is checked here.
"""

import math
import re
from collections import Counter
from typing import Any

from qerl_jax.config import PROJECTIONS, DataConfig, ExperimentConfig

BOUNDS = {
    "seed": "[0, 4294967295]",  # jax.random.key keeps 32 bits
    "model.logits_chunk": "[1, inf)",
    "lora.rank": "[1, inf)",
    "lora.alpha": "(0, inf)",
    "aqn.sigma_start": "[0, inf)",
    "aqn.sigma_end": "[0, inf)",
    "aqn.num_stages": "[1, inf)",
    "data.train_size": "[1, inf)",
    "data.eval_size": "[1, inf)",
    "data.data_seed": "[0, 4294967294]",
    "data.max_prompt_tokens": "[1, inf)",
    "rollout.prompts_per_step": "[1, inf)",
    "rollout.num_generations": "[2, inf)",
    "rollout.max_completion_tokens": "[1, inf)",
    "rollout.temperature": "[0.001, inf)",
    "rollout.top_k": "[0, inf)",
    "rollout.top_p": "[0.000001, 1]",
    "rollout.min_p": "[0, 1)",
    "loss.advantage_eps": "(0, inf)",
    "loss.epsilon_low": "(0, 1]",
    "loss.epsilon_high": "(0, inf)",
    "loss.beta": "[0, inf)",
    "loss.importance_cap": "(0, inf)",
    "optimizer.learning_rate": "(0, inf)",
    "optimizer.warmup_steps": "[0, inf)",
    "optimizer.b1": "[0, 1)",
    "optimizer.b2": "[0, 1)",
    "optimizer.eps": "(0, inf)",
    "optimizer.weight_decay": "[0, inf)",
    "optimizer.max_grad_norm": "[0, inf)",
    "optimizer.micro_batch_size": "[1, inf)",
    "optimizer.num_iterations": "[1, inf)",
    "train.total_steps": "[1, inf)",
    "train.checkpoint_every": "[0, inf)",
    "train.keep_checkpoints": "[1, inf)",
    "train.log_samples_every": "[0, inf)",
    "eval.every": "[0, inf)",
    "eval.batch_size": "[1, inf)",
    "eval.num_samples": "[1, inf)",
    "eval.temperature": "0 or [0.001, inf)",
    "eval.top_k": "[0, inf)",
    "eval.top_p": "[0.000001, 1]",
    "eval.min_p": "[0, 1)",
    "eval.max_completion_tokens": "[1, inf)",
}

LARGEST = 1_000_000_000  # where an interval says inf: beyond lie slips of the hand, and overflow
GEOMETRIC_SCHEDULES = ("released", "paper_eq8", "algorithm1")  # they divide by sigma_start
READ_BY = {  # fields of `data` that only some sources read
    "subset": ("hub",),
    "train_split": ("hub",),
    "eval_split": ("hub",),
    "train_path": ("jsonl",),
    "eval_path": ("jsonl",),
    "task": ("arithmetic", "reasoning_gym"),
    "question_field": ("hub", "jsonl"),
    "answer_field": ("hub", "jsonl"),
    "answer_marker": ("hub", "jsonl"),
}
_NOT_EMPTY = (
    "run_dir",
    "model.path",
    "lora.init_from",
    "data.train_path",
    "data.eval_path",
    "data.question_field",
    "data.answer_field",
    "data.answer_marker",
    "eval.correct",
)
_USER_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def validate_config(config: ExperimentConfig) -> None:
    """Check every bound and every rule between fields; touch neither files nor devices.

    Raises ValueError("section.field: ...") for the first that does not hold.
    """
    for name, interval in BOUNDS.items():
        value = _get(config, name)
        problem = None if value is None else interval_problem(value, interval)
        if problem:
            raise ValueError(f"{name}: {problem}")
    for name in _NOT_EMPTY:
        value = _get(config, name)
        if value is not None and not value.strip():
            raise ValueError(f"{name}: is empty")
    _check_names(config)
    _check_aqn(config)
    _check_data(config)
    _check_reward(config)
    _check_loss(config)
    _check_optimizer(config)


def interval_problem(value: int | float, interval: str) -> str | None:
    """Return what is wrong with a number outside an interval such as "(0, 1]", or None.

    "0 or [0.5, inf)" allows 0 as well; inf stands for LARGEST.
    """
    zero, _, interval = interval.rpartition(" or ")
    if zero and value == 0:
        return None
    low, high = interval[1:-1].split(", ")
    top = LARGEST if high == "inf" else float(high)
    above = value >= float(low) if interval[0] == "[" else value > float(low)
    below = value < float(high) if high != "inf" and interval[-1] == ")" else value <= top
    if above and below:
        return None
    expected = "expected 0 or " if zero else "expected "
    if isinstance(value, float) and not math.isfinite(value):
        return f"expected a finite number, got {value}"
    if high != "inf":
        return f"{expected}a number in {interval}, got {value}"
    if above:
        return f"{expected}at most {LARGEST}, got {value}"
    return f"{expected}{'>=' if interval[0] == '[' else '>'} {low}, got {value}"


def _get(config: ExperimentConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _check_names(config: ExperimentConfig) -> None:
    for name in ("lora.targets", "aqn.targets", "reward.functions"):
        values = _get(config, name)
        if not values:
            raise ValueError(f"{name}: the list is empty")
        repeated = [value for value, count in Counter(values).items() if count > 1]
        if repeated:
            raise ValueError(f'{name}: "{repeated[0]}" is listed twice')
    for target in config.lora.targets:
        if target not in PROJECTIONS:
            raise ValueError(f'lora.targets: "{target}" is not one of {", ".join(PROJECTIONS)}')
    named = [(n, _get(config, n)) for n in ("aqn.schedule", "loss.name", "loss.advantage")]
    named += [("reward.functions", name) for name in config.reward.functions]
    named += [("eval.correct", config.eval.correct)] if config.eval.correct is not None else []
    for field, value in named:
        if ":" in value and not _USER_FUNCTION.fullmatch(value):
            raise ValueError(f'{field}: "{value}" is not of the form module:function')


def _check_aqn(config: ExperimentConfig) -> None:
    aqn, loss = config.aqn, config.loss
    if aqn.sigma_end > aqn.sigma_start:
        raise ValueError(
            f"aqn.sigma_end: {aqn.sigma_end} exceeds aqn.sigma_start, {aqn.sigma_start}"
        )
    if aqn.enabled and aqn.schedule in GEOMETRIC_SCHEDULES and aqn.sigma_end == 0:
        raise ValueError(f"aqn.sigma_end: expected > 0 for the schedule {aqn.schedule}, got 0.0")
    corrected = loss.old_logprobs == "sampler" or loss.importance_cap is not None
    if aqn.enabled and aqn.apply_to == "rollout" and not corrected:
        raise ValueError(
            "aqn.apply_to: rollout samples off-policy; set loss.old_logprobs: sampler or "
            "loss.importance_cap"
        )


def _check_data(config: ExperimentConfig) -> None:
    data = config.data
    for name, sources in READ_BY.items():
        if getattr(data, name) != getattr(DataConfig(), name) and data.source not in sources:
            allowed = " and ".join(sources)
            raise ValueError(f"data.{name}: is read for source {allowed} only, not {data.source}")
    for name in ("train_path", "eval_path"):
        if data.source == "jsonl" and not getattr(data, name):
            raise ValueError(f"data.{name}: data.source jsonl needs the path of a file")
    if data.source != "jsonl" and not data.name:
        raise ValueError(f"data.name: is empty; data.source {data.source} needs it")
    if data.system_prompt is not None and not data.chat_template:
        raise ValueError("data.system_prompt: has no place without data.chat_template: true")
    if "{question}" not in data.prompt_template:
        raise ValueError("data.prompt_template: does not hold {question}")


def _check_reward(config: ExperimentConfig) -> None:
    functions, weights = config.reward.functions, config.reward.weights
    if len(weights) != len(functions):
        raise ValueError(
            f"reward.weights: {len(weights)} for {len(functions)} reward.functions; "
            "expected one weight each"
        )
    for weight in weights:
        if not math.isfinite(weight):
            raise ValueError(f"reward.weights: expected finite numbers, got {weight}")
        if abs(weight) > LARGEST:
            raise ValueError(f"reward.weights: expected at most {LARGEST}, got {weight}")


def _check_loss(config: ExperimentConfig) -> None:
    loss = config.loss
    if loss.name in ("dapo", "dr_grpo") and loss.beta != 0:
        raise ValueError(f"loss.beta: {loss.name} has no KL term; expected 0, got {loss.beta}")
    if loss.importance_cap is not None and loss.old_logprobs == "sampler":
        raise ValueError(
            "loss.importance_cap: corrects nothing with loss.old_logprobs: sampler, whose ratio "
            "is to the sampler already; set one of them"
        )
    if loss.extra and ":" not in loss.name + loss.advantage:
        raise ValueError(
            f"loss.extra: only a module:function takes it, neither {loss.name} nor {loss.advantage}"
        )
    for name, value in loss.extra.items():
        if not math.isfinite(value):
            raise ValueError(f"loss.extra.{name}: expected a finite number, got {value}")


def _check_optimizer(config: ExperimentConfig) -> None:
    optimizer, rollout = config.optimizer, config.rollout
    completions = rollout.prompts_per_step * rollout.num_generations
    micro = optimizer.micro_batch_size
    if micro is not None and completions % micro:
        raise ValueError(
            f"optimizer.micro_batch_size: {micro} does not divide {completions} "
            "(rollout.prompts_per_step x rollout.num_generations)"
        )
    steps = config.train.total_steps * optimizer.num_iterations
    if steps > LARGEST:
        raise ValueError(
            f"optimizer.num_iterations: train.total_steps x optimizer.num_iterations is {steps}, "
            f"expected at most {LARGEST}"
        )
    if optimizer.warmup_steps >= steps:
        raise ValueError(
            f"optimizer.warmup_steps: expected < {steps} "
            f"(train.total_steps x optimizer.num_iterations), got {optimizer.warmup_steps}"
        )
