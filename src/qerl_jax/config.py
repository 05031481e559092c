"""Every knob of an experiment: frozen dataclasses of plain scalars, one line per field."""

from dataclasses import dataclass, field
from typing import Literal

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The base model and how it is computed."""

    path: str = "tiny"  # "tiny" (the embedded model) or a Hugging Face folder
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # activations and matmuls
    remat: bool = True  # recompute each layer in the backward pass
    logits_chunk: int = 1024  # rows of [tokens, vocab] logits alive at once, in tokens


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """How the base weights are stored."""

    format: Literal["nvfp4", "none"] = "nvfp4"  # none: keep the checkpoint's 16-bit weights
    scale_rounding: Literal["float32", "bfloat16"] = "float32"  # see quant/nvfp4.py


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The trained adapter."""

    rank: int = 16
    alpha: float = 32.0  # the update is scaled by alpha / rank
    targets: tuple[str, ...] = PROJECTIONS
    train_norms: bool = False  # also train the two norm scales of each block, in full
    init_from: str | None = None  # folder of a PEFT adapter to start from


@dataclass(frozen=True, kw_only=True)
class AqnConfig:
    """Adaptive quantization noise on norm scales."""

    enabled: bool = True
    schedule: str = "released"  # name in aqn.AQN_SCHEDULES, or module:function
    sigma_start: float = 1e-2
    sigma_end: float = 1e-4
    num_stages: int = 10
    apply_to: Literal["both", "rollout"] = "both"  # both: the trainer sees the rollout's noise
    targets: tuple[str, ...] = BLOCK_NORMS  # norm names; "norm" is the final norm


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the questions come from and how they become prompts."""

    source: Literal["arithmetic", "jsonl", "hub", "reasoning_gym"] = "arithmetic"
    name: str = "addition"  # arithmetic operation, hub data set or reasoning-gym task
    subset: str | None = None  # hub configuration name
    train_path: str | None = None  # jsonl: .jsonl or .jsonl.gz
    eval_path: str | None = None
    train_split: str = "train"  # hub split names
    eval_split: str = "test"
    train_size: int | None = None  # examples to generate or to keep; null: all
    eval_size: int | None = 256
    data_seed: int = 0  # generated tasks: train uses data_seed, eval data_seed + 1
    task: dict[str, int] = field(default_factory=dict)  # arguments of a generated task
    question_field: str = "question"
    answer_field: str = "answer"
    answer_marker: str | None = None  # the gold answer is what follows it, e.g. "####"
    prompt_template: str = "{question}"
    chat_template: bool = False  # wrap the prompt with the tokenizer's chat template
    system_prompt: str | None = None  # chat_template only; null: the template's own default
    max_prompt_tokens: int = 128  # longer prompts are dropped and counted


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling of completions during training."""

    prompts_per_step: int = 16
    num_generations: int = 8  # group size
    max_completion_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    weights: Literal["expanded", "packed"] = "expanded"  # dequantize once a rollout, or each token


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Weighted sum of reward functions."""

    functions: tuple[str, ...] = ("exact_number",)  # names in rewards.REWARDS, or module:function
    weights: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss. GRPO, DAPO and Dr.GRPO are points in one space."""

    name: str = "grpo"  # name in rl.losses.POLICY_LOSSES, or module:function
    aggregation: Literal["auto", "token_mean", "sequence_mean", "fixed_length_mean"] = "auto"
    advantage: str = "auto"  # auto: the loss's; or a name in rl.ADVANTAGES, or module:function
    advantage_eps: float = 1e-4  # added to the group's standard deviation
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0  # weight of the KL to the base model; 0: no reference forward
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    log_kl: bool = False  # log the KL to the base model also where beta is 0 (one more forward)
    mask_truncated: bool = False  # completions cut by the token limit carry no loss
    old_logprobs: Literal["trainer", "sampler"] = "trainer"  # denominator of the ratio
    importance_cap: float | None = None  # truncated importance sampling trainer/sampler; null: off
    extra: dict[str, float] = field(
        default_factory=dict
    )  # keyword arguments of a user's loss or advantage


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and the shape of an optimizer step."""

    learning_rate: float = 1e-5
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0  # optimizer steps
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0  # on LoRA matrices, never on norm scales
    max_grad_norm: float = 1.0  # 0: no clipping
    micro_batch_size: int | None = None  # completions per backward pass; null: all at once
    num_iterations: int = 1  # optimizer steps on each rollout


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run and what it leaves on disk."""

    total_steps: int = 100  # rollouts; each takes optimizer.num_iterations optimizer steps
    checkpoint_every: int = 50  # steps; 0: only at the end
    keep_checkpoints: int = 2
    log_samples_every: int = 10  # steps between samples shown and written; 0: never


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The one evaluation harness: before, during and after training, and `qerl eval`."""

    every: int = 0  # steps; 0: only before the first and after the last step
    batch_size: int = 64  # completions generated at once
    num_samples: int = 1  # completions per problem
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_completion_tokens: int | None = None  # null: rollout.max_completion_tokens
    correct: str | None = None  # reward whose 1.0 means a right answer; null: the first one


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One experiment."""

    run_dir: str = "runs/default"
    seed: int = 0
    model: ModelConfig = ModelConfig()
    quant: QuantConfig = QuantConfig()
    lora: LoraConfig = LoraConfig()
    aqn: AqnConfig = AqnConfig()
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
