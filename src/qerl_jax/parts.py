"""The functions that a config chooses by name, looked up, bound and checked."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import optax

from qerl_jax.aqn import AQN_SCHEDULES
from qerl_jax.config import ExperimentConfig, LossConfig
from qerl_jax.contracts import (
    ADVANTAGE_DATA,
    LOSS_DATA,
    check_reward,
    check_token_loss,
    make_advantage,
    make_schedule,
)
from qerl_jax.optim import learning_rate_at, make_optimizer
from qerl_jax.protocols import AdvantageFn, RewardFn, Schedule, TokenLossFn
from qerl_jax.resolve import bind_keywords, keyword_names, load_function, nearest_hint
from qerl_jax.rewards import REWARDS, combine_rewards
from qerl_jax.rl import ADVANTAGES, POLICY_LOSSES
from qerl_jax.rollout import ScoreFn


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The functions that a config chooses by name."""

    schedule: Schedule  # step -> sigma
    score_fn: ScoreFn
    correct_name: str  # the reward whose 1.0 counts as a right answer
    advantage_fn: AdvantageFn
    token_loss: TokenLossFn
    aggregation: str
    learning_rate: Callable[[int], Any]  # of an optimizer step
    optimizer: optax.GradientTransformation


def build_parts(config: ExperimentConfig) -> Parts:
    """Look up and bind the functions that the config names."""
    aqn, reward, rollout = config.aqn, config.reward, config.rollout
    advantage_name, advantage, for_advantage = _advantage(config)
    schedule = load_function(aqn.schedule, field="aqn.schedule", table=AQN_SCHEDULES)
    rewards = {name: _reward(name, field="reward.functions") for name in reward.functions}
    correct = config.eval.correct or reward.functions[0]
    weights = reward.weights
    if correct not in rewards:
        # Judged and logged beside the rewards, without a part in them.
        rewards[correct] = _reward(correct, field="eval.correct")
        weights = (*weights, 0.0)
    return Parts(
        schedule=make_schedule(
            schedule,
            place=f"aqn.schedule: {aqn.schedule}",
            sigma_start=aqn.sigma_start,
            sigma_end=aqn.sigma_end,
            num_stages=aqn.num_stages,
            total_steps=config.train.total_steps,
        ),
        score_fn=combine_rewards(rewards, weights),
        correct_name=correct,
        advantage_fn=make_advantage(
            advantage,
            place=f"loss.advantage: {advantage_name}",
            shape=_oblong(rollout.num_generations, rollout.prompts_per_step)[::-1],
        ),
        token_loss=_policy_loss(config, advantage_name, for_advantage),
        aggregation=_aggregation(config),
        learning_rate=partial(learning_rate_at, **_rate(config)),
        optimizer=build_optimizer(config),
    )


def _reward(name: str, *, field: str) -> RewardFn:
    reward = load_function(name, field=field, table=REWARDS)
    check_reward(reward, place=f"{field}: {name}")
    return reward


def build_optimizer(config: ExperimentConfig) -> optax.GradientTransformation:
    """Build the optimizer over all optimizer steps of the run."""
    opt = config.optimizer
    return make_optimizer(
        **_rate(config),
        b1=opt.b1,
        b2=opt.b2,
        eps=opt.eps,
        weight_decay=opt.weight_decay,
        max_grad_norm=opt.max_grad_norm,
    )


def _rate(config: ExperimentConfig) -> dict[str, Any]:
    opt = config.optimizer
    return {
        "learning_rate": opt.learning_rate,
        "schedule": opt.schedule,
        "warmup_steps": opt.warmup_steps,
        "total_steps": config.train.total_steps * opt.num_iterations,
    }


def _advantage(config: ExperimentConfig) -> tuple[str, AdvantageFn, frozenset[str]]:
    """Bind the advantage; returns (name, function, names of the hyperparameters it takes)."""
    loss = config.loss
    known = POLICY_LOSSES.get(loss.name)
    name = loss.advantage
    if name == "auto":
        name = known.advantage if known else "group_bessel"
    chosen = load_function(name, field="loss.advantage", table=ADVANTAGES)
    names = keyword_names(chosen, field=f"loss.advantage: {name}")
    available = {**_hyperparameters(loss), "eps": loss.advantage_eps}
    bound = bind_keywords(chosen, available, data=ADVANTAGE_DATA, place=f"loss.advantage: {name}")
    return name, bound, names - {"eps"}


def _hyperparameters(loss: LossConfig) -> dict[str, Any]:
    """Return what the section offers to a loss and to an advantage, by name."""
    fields = asdict(loss)
    for name in loss.extra:
        if name in fields:
            raise ValueError(f'loss.extra: "{name}" has a field of its own; set it there')
    return {**fields, **loss.extra}


def _policy_loss(
    config: ExperimentConfig, advantage: str, for_advantage: frozenset[str]
) -> TokenLossFn:
    """Bind the loss to the hyperparameters it takes, and check it.

    `for_advantage`: names that the advantage takes of loss.extra.
    """
    loss, rollout, place = config.loss, config.rollout, f"loss.name: {config.loss.name}"
    table = {name: entry.token_loss for name, entry in POLICY_LOSSES.items()}
    chosen = load_function(loss.name, field="loss.name", table=table)
    names = keyword_names(chosen, field=place)
    if loss.beta != 0 and "beta" not in names:
        raise ValueError(f"loss.beta: {loss.beta} is set, but loss.name {loss.name} takes no beta")
    for name in loss.extra:
        if name == "eps" and name not in names:
            raise ValueError('loss.extra: "eps" of an advantage is set by loss.advantage_eps')
        if name not in names | for_advantage:
            raise ValueError(
                f'loss.extra: "{name}" is a keyword-only parameter of neither {loss.name} nor '
                f"{advantage}{nearest_hint(name, names | for_advantage)}"
            )
    bound = bind_keywords(chosen, _hyperparameters(loss), data=LOSS_DATA, place=place)
    rows = config.optimizer.micro_batch_size or rollout.prompts_per_step * rollout.num_generations
    check_token_loss(
        bound,
        place=place,
        reference=loss.beta > 0 or loss.log_kl,
        shape=_oblong(rows, rollout.max_completion_tokens),
    )
    return bound


def _oblong(rows: int, columns: int) -> tuple[int, int]:
    # In a square a forgotten [:, None] or keepdims broadcasts along the wrong axis, unseen.
    return rows, columns + (rows == columns)


def _aggregation(config: ExperimentConfig) -> str:
    """Return the aggregation of the config; auto is that of the loss, or token_mean."""
    if config.loss.aggregation != "auto":
        return config.loss.aggregation
    known = POLICY_LOSSES.get(config.loss.name)
    return known.aggregation if known else "token_mean"
