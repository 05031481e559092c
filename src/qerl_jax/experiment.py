"""The composition root: a config becomes functions and arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from qerl_jax.base_model import ModelFolder, check_ids, load_weights, open_model
from qerl_jax.config import EvalConfig, ExperimentConfig, RolloutConfig
from qerl_jax.config_rules import validate_config
from qerl_jax.data import Prompt, encode_prompts, load_examples
from qerl_jax.learner import make_logprobs, make_update_step
from qerl_jax.lora import LoraAdapter, check_lora
from qerl_jax.models import abstract_params, completion_logprobs
from qerl_jax.parts import Parts, build_parts
from qerl_jax.policy import policy_params
from qerl_jax.protocols import Params
from qerl_jax.rewards import NUMBER_REWARDS, validate_answer
from qerl_jax.rollout import Rollout, roll_out
from qerl_jax.sampling import SamplingConfig, generate
from qerl_jax.state import make_trainable


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
    first = train_prompts[0]
    for completion in (first.answer, "", first.text):  # a reward that fails does so here
        parts.score_fn(first.text, completion, first.answer)
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
        trainable = jax.eval_shape(lambda p: make_trainable(config, p, key), shapes)
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


def sample_prompts(
    experiment: Experiment,
    policy: Params,
    adapter: LoraAdapter | None,
    prompts: Sequence[Prompt],
    key: jax.Array,
    *,
    settings: RolloutConfig | EvalConfig,
    max_completion_tokens: int,
    num_generations: int = 1,
    sample_ids: np.ndarray | None = None,
) -> Rollout:
    """Sample and score completions as `settings` say, of which both sections have the same ones."""
    model = experiment.model
    sampling = SamplingConfig(
        max_completion_tokens=max_completion_tokens,
        end_ids=model.end_ids,
        pad_id=model.pad_id,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
    )

    def generate_fn(prompt_ids, prompt_mask, sample_ids):
        return generate(
            policy,
            adapter,
            prompt_ids,
            prompt_mask,
            key,
            sample_ids,
            config=model.config,
            sampling=sampling,
            weights=experiment.config.rollout.weights,
        )

    return roll_out(
        prompts,
        generate_fn,
        experiment.parts.score_fn,
        model.tokenizer,
        num_generations=num_generations,
        prompt_width=experiment.prompt_width,
        pad_id=model.pad_id,
        sample_ids=sample_ids,
    )


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
