"""The composition root: a config becomes functions and arrays."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from qerl_jax.aqn import AQN_SCHEDULES
from qerl_jax.base_model import ModelFolder, check_ids, load_weights, open_model
from qerl_jax.config import ExperimentConfig
from qerl_jax.config_rules import validate_config
from qerl_jax.contracts import (
    check_advantage,
    check_reward,
    check_schedule,
    check_token_loss,
    make_schedule,
)
from qerl_jax.data import Prompt, encode_prompts, load_examples
from qerl_jax.learner import TrainState, make_logprobs, make_update_step
from qerl_jax.lora import Trainable, check_lora, init_trainable
from qerl_jax.models import abstract_params, completion_logprobs
from qerl_jax.optim import learning_rate_at, make_optimizer
from qerl_jax.peft import import_adapter
from qerl_jax.policy import policy_params
from qerl_jax.protocols import AdvantageFn, Params, RewardFn, Schedule, TokenLossFn
from qerl_jax.resolve import bind_keywords, keyword_names, load_function
from qerl_jax.rewards import NUMBER_REWARDS, REWARDS, combine_rewards, validate_answer
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


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything a run needs, built once; `params` is None in a dry run."""

    config: ExperimentConfig
    parts: Parts
    model: ModelFolder
    params: Params | None
    train_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    dropped: int  # training prompts over data.max_prompt_tokens
    eval_dropped: int  # held-out prompts over it
    prompt_width: int  # tokens, of all padded prompts
    update_step: Callable[..., Any]
    old_logprobs: Callable[..., Any]  # under the trainer's policy
    ref_logprobs: Callable[..., Any]  # under the base model


def build_experiment(config: ExperimentConfig, *, load: bool = True) -> Experiment:
    """Check a config against the model and the data, and build its functions.

    Cheap checks come first: names, shapes and data before any weight is read.
    Raises ValueError (or an OSError) whose message starts with the place at fault.
    """
    validate_config(config)
    parts = build_parts(config)
    model = open_experiment_model(config)
    train_prompts, dropped = experiment_prompts(config, model, "train")
    eval_prompts, eval_dropped = experiment_prompts(config, model, "eval")
    width = max(len(prompt.ids) for prompt in (*train_prompts, *eval_prompts))
    check_context(config, model, width)
    return Experiment(
        config=config,
        parts=parts,
        model=model,
        params=load_experiment_weights(config, model) if load else None,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        dropped=dropped,
        eval_dropped=eval_dropped,
        prompt_width=width,
        **_programs(config, model, parts),
    )


def build_parts(config: ExperimentConfig) -> Parts:
    """Look up and bind the functions that the config names."""
    aqn, reward = config.aqn, config.reward
    advantage, for_advantage = _advantage(config)
    token_loss, aggregation = _policy_loss(config, set(for_advantage))
    schedule = load_function(aqn.schedule, field="aqn.schedule", table=AQN_SCHEDULES)
    rewards = {name: _reward(name, field="reward.functions") for name in reward.functions}
    correct = config.eval.correct or reward.functions[0]
    weights = reward.weights
    if correct not in rewards:
        # Judged and logged beside the rewards, without a part in them.
        rewards[correct] = _reward(correct, field="eval.correct")
        weights = (*weights, 0.0)
    parts = Parts(
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
        advantage_fn=advantage,
        token_loss=token_loss,
        aggregation=aggregation,
        learning_rate=partial(learning_rate_at, **_rate(config)),
        optimizer=build_optimizer(config),
    )
    _check_parts(config, parts)
    return parts


def _reward(name: str, *, field: str) -> RewardFn:
    reward = load_function(name, field=field, table=REWARDS)
    check_reward(reward, place=f"{field}: {name}")
    return reward


def _check_parts(config: ExperimentConfig, parts: Parts) -> None:
    """Refuse functions of the user's that would fail later, or broadcast."""
    loss, aqn = config.loss, config.aqn
    check_token_loss(
        parts.token_loss,
        place=f"loss.name: {loss.name}",
        reference=loss.beta > 0 or loss.log_kl,
    )
    check_advantage(parts.advantage_fn, place=f"loss.advantage: {loss.advantage}")
    check_schedule(
        parts.schedule,
        total_steps=config.train.total_steps,
        place=f"aqn.schedule: {aqn.schedule}",
    )


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


def _advantage(config: ExperimentConfig) -> tuple[AdvantageFn, dict[str, float]]:
    """Bind the advantage; returns it and what it takes of loss.extra."""
    loss = config.loss
    chosen = load_function(loss.advantage, field="loss.advantage", table=ADVANTAGES)
    extra = {k: v for k, v in loss.extra.items() if k in keyword_names(chosen)}
    available = {"eps": loss.advantage_eps}
    return bind_keywords(chosen, available, extra=extra, field="loss.advantage"), extra


def _policy_loss(config: ExperimentConfig, taken: set[str]) -> tuple[TokenLossFn, str]:
    """Bind the loss to the hyperparameters it takes; a user's loss defaults to token_mean.

    `taken`: names in loss.extra that the advantage takes.
    """
    loss = config.loss
    table = {name: entry.token_loss for name, entry in POLICY_LOSSES.items()}
    chosen = load_function(loss.name, field="loss.name", table=table)
    if loss.beta != 0 and "beta" not in keyword_names(chosen):
        raise ValueError(f"loss.beta: {loss.beta} is set, but loss.name {loss.name} takes no beta")
    extra = {k: v for k, v in loss.extra.items() if k in keyword_names(chosen) or k not in taken}
    bound = bind_keywords(chosen, asdict(loss), extra=extra, field="loss.name")
    if loss.aggregation != "auto":
        return bound, loss.aggregation
    known = POLICY_LOSSES.get(loss.name)
    return bound, known.aggregation if known else "token_mean"


def open_experiment_model(config: ExperimentConfig) -> ModelFolder:
    """Open the model and check the adapter and the noise against its shapes."""
    model = open_model(
        config.model.path,
        dtype=config.model.compute_dtype,
        remat=config.model.remat,
        logits_chunk=config.model.logits_chunk,
        quantize=config.quant.format == "nvfp4",
        field="model.path",
    )
    shapes = abstract_params(model.config)
    check_lora(shapes, targets=config.lora.targets, rank=config.lora.rank)
    if config.aqn.enabled:
        noisy = partial(policy_params, noise_targets=config.aqn.targets)
        key = jax.random.key(0)
        trainable = jax.eval_shape(lambda p: _init_trainable(config, p, key), shapes)
        jax.eval_shape(noisy, shapes, trainable, jax.random.key(0), 0.0)
    return model


def load_experiment_weights(config: ExperimentConfig, model: ModelFolder) -> Params:
    """Read the frozen weights as the config stores them."""
    return load_weights(
        model,
        quantize=config.quant.format == "nvfp4",
        scale_rounding=config.quant.scale_rounding,
    )


def experiment_prompts(
    config: ExperimentConfig, model: ModelFolder, part: str
) -> tuple[tuple[Prompt, ...], int]:
    """Load and tokenize the questions of one part; returns (prompts, number dropped)."""
    data = config.data
    training = part == "train"
    # A gold answer that no completion can match would only look like a hard problem.
    need_number = not NUMBER_REWARDS.isdisjoint((*config.reward.functions, config.eval.correct))
    examples = load_examples(
        source=data.source,
        name=data.name,
        subset=data.subset,
        path=data.train_path if training else data.eval_path,
        split=data.train_split if training else data.eval_split,
        size=data.train_size if training else data.eval_size,
        seed=data.data_seed,
        task=data.task,
        question_field=data.question_field,
        answer_field=data.answer_field,
        answer_marker=data.answer_marker,
        part=part,
        check_answer=validate_answer if need_number else None,
    )
    prompts, dropped = encode_prompts(
        examples,
        model.tokenizer,
        prompt_template=data.prompt_template,
        chat_template=data.chat_template,
        system_prompt=data.system_prompt,
        max_prompt_tokens=data.max_prompt_tokens,
    )
    for prompt in prompts:
        check_ids(prompt.ids, model, f"model.path: {model.path}: prompt {prompt.text[:40]!r}")
    return prompts, dropped


def check_context(config: ExperimentConfig, model: ModelFolder, prompt_width: int) -> None:
    """Refuse completions that would run past the model's context.

    Raises ValueError.
    """
    limit = model.config.max_positions
    for field, tokens in (
        ("rollout.max_completion_tokens", config.rollout.max_completion_tokens),
        ("eval.max_completion_tokens", config.eval.max_completion_tokens or 0),
    ):
        if prompt_width + tokens > limit:
            raise ValueError(
                f"{field}: {tokens} after prompts of up to {prompt_width} tokens exceeds the "
                f"model's context of {limit} tokens"
            )


def noise_targets(config: ExperimentConfig, *, rollout: bool) -> tuple[str, ...] | None:
    """Norms that carry noise in the rollout, or in the trainer; None: no noise there."""
    here = rollout or config.aqn.apply_to == "both"
    return config.aqn.targets if config.aqn.enabled and here else None


def _programs(config: ExperimentConfig, model: ModelFolder, parts: Parts) -> dict[str, Any]:
    """Build the jitted programs of training."""
    rows = config.rollout.prompts_per_step * config.rollout.num_generations
    micro = config.optimizer.micro_batch_size or rows
    read = partial(completion_logprobs, config=model.config, temperature=config.rollout.temperature)
    targets = noise_targets(config, rollout=False)

    def policy_logprobs(params, trainable, tokens, noise_key, sigma):
        policy = policy_params(params, trainable, noise_key, sigma, noise_targets=targets)
        return read(policy, trainable.adapter, tokens)

    def base_logprobs(params, _trainable, tokens, _noise_key, _sigma):
        return read(params, None, tokens)

    return {
        "update_step": make_update_step(
            policy_logprobs,
            parts.token_loss,
            parts.optimizer,
            micro_batch_size=micro,
            importance_cap=config.loss.importance_cap,
        ),
        "old_logprobs": make_logprobs(policy_logprobs, micro_batch_size=micro),
        "ref_logprobs": make_logprobs(base_logprobs, micro_batch_size=micro),
    }


def _init_trainable(config: ExperimentConfig, params: Params, key):
    lora = config.lora
    return init_trainable(
        key,
        params,
        targets=lora.targets,
        rank=lora.rank,
        alpha=lora.alpha,
        train_norms=lora.train_norms,
    )


def describe(trainable: Trainable) -> str:
    """Name what makes two adapters interchangeable: targets, rank, scale, trained norms."""
    pairs = trainable.adapter.pairs
    rank = next(iter(pairs.values()))["a"].shape[-1]
    norms = "with" if trainable.norm_scales else "without"
    return (
        f"{'+'.join(sorted(pairs))} of rank {rank}, scale {trainable.adapter.scale:g}, "
        f"{norms} trained norms"
    )


def init_state(
    config: ExperimentConfig, optimizer: optax.GradientTransformation, params: Params
) -> TrainState:
    """Make the state of step 0, from the seed alone or from lora.init_from."""
    init_key, run_key = jax.random.split(jax.random.key(config.seed))
    trainable = _init_trainable(config, params, init_key)
    if config.lora.init_from:
        given = import_adapter(config.lora.init_from, params, field="lora.init_from")
        if describe(given) != describe(trainable):
            raise ValueError(
                f"lora.init_from: {config.lora.init_from} has {describe(given)}, "
                f"the lora section asks for {describe(trainable)}"
            )
        trainable = given
    return TrainState(
        step=jnp.int32(0),
        trainable=trainable,
        opt_state=optimizer.init(trainable),
        key=run_key,
    )
