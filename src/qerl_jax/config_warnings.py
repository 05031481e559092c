"""Settings that are allowed and may surprise."""

import math
import os

from qerl_jax.aqn import AQN_SCHEDULES
from qerl_jax.config import AqnConfig, ExperimentConfig
from qerl_jax.rewards import NUMBER_REWARDS


def config_warnings(config: ExperimentConfig) -> tuple[str, ...]:
    """Return notes on settings that are allowed and may surprise."""
    rollout, loss, evaluation, data = config.rollout, config.loss, config.eval, config.data
    inert = config.optimizer.num_iterations == 1 and loss.old_logprobs == "trainer"
    judge = config.reward.functions[0]
    truncated = rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0
    notes = (
        (
            inert and (loss.epsilon_low, loss.epsilon_high) != (0.2, 0.2),
            "loss.epsilon_low, loss.epsilon_high: clipping is inert, the ratio is always 1 "
            "(optimizer.num_iterations: 1 and loss.old_logprobs: trainer)",
        ),
        (
            loss.beta > 0 and loss.kl_estimator == "k1",
            "loss.kl_estimator: the gradient of k1 is 0 on average: loss.beta adds noise, no pull",
        ),
        (
            truncated,
            "rollout.top_k, top_p, min_p: completions are sampled from a truncated distribution, "
            "the trainer's log-probs are of the full one",
        ),
        (
            all(weight == 0 for weight in config.reward.weights),
            "reward.weights: all are 0, so every advantage is 0 and nothing is learned",
        ),
        (
            evaluation.num_samples > 1 and evaluation.temperature == 0,
            "eval.num_samples: greedy samples are all equal (eval.temperature: 0)",
        ),
        (
            config.aqn.enabled and _is_silent(config.aqn, config.train.total_steps),
            f"aqn.enabled: the schedule {config.aqn.schedule} has no step with noise (sigma_start "
            f"{config.aqn.sigma_start}, num_stages {config.aqn.num_stages}, train.total_steps "
            f"{config.train.total_steps})",
        ),
        (
            evaluation.correct is None and judge not in NUMBER_REWARDS,
            f"eval.correct: accuracy counts the completions that {judge}, the first of "
            "reward.functions, gives exactly 1; name another reward here if that is not meant",
        ),
        (
            data.source == "jsonl" and _same_file(data.train_path, data.eval_path),
            "data.eval_path: is data.train_path, so no problem is held out",
        ),
        (
            loss.name == "dapo" and loss.epsilon_high <= loss.epsilon_low and not inert,
            "loss.epsilon_high: DAPO's upper clip is the wider one, 0.28 against 0.2",
        ),
    )
    return tuple(text for holds, text in notes if holds)


def _same_file(first: str | None, second: str | None) -> bool:
    return first == second or ((first and second) and _whole(first) == _whole(second))


def _whole(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def _is_silent(aqn: AqnConfig, total_steps: int) -> bool:
    """Tell whether a schedule of the table has sigma 0 at every step; a user's is not called."""
    if aqn.schedule not in AQN_SCHEDULES:
        return False
    schedule = AQN_SCHEDULES[aqn.schedule](
        sigma_start=aqn.sigma_start,
        sigma_end=aqn.sigma_end,
        num_stages=aqn.num_stages,
        total_steps=total_steps,
    )
    steps = (*range(0, total_steps, math.ceil(total_steps / 1000)), total_steps - 1)
    return all(schedule(step) == 0 for step in steps)
