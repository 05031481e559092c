"""Small things to try the package with: a random decoder, its adapter and rows, toy prompts.

Shipped, because notebooks and users' own tests need them too.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from qerl_jax.data import Prompt, arithmetic_examples, encode_prompts
from qerl_jax.lora import LoraAdapter, init_lora, lora_targets
from qerl_jax.models import DecoderConfig, TokenBatch, decoder_config_from_hf, init_params
from qerl_jax.protocols import Params
from qerl_jax.quant import quantize_params

# What the families differ in; every input size is a multiple of 16, as NVFP4 asks.
_FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 32},
}


def tiny_config(family: str = "qwen2", **changes: Any) -> DecoderConfig:
    """Return the shape of a decoder of a few ten thousand parameters, computed in float32.

    `changes` are fields of DecoderConfig, e.g. dtype="bfloat16".

    Raises:
        ValueError: a family other than llama, qwen2 and qwen3.
    """
    if family not in _FAMILIES:
        raise ValueError(f"tiny_config: {family!r} is not one of {', '.join(_FAMILIES)}")
    shape = {
        "model_type": family,
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
    }
    return dataclasses.replace(decoder_config_from_hf(shape | _FAMILIES[family]), **changes)


def tiny_params(
    key: Key[Array, ""], config: DecoderConfig, *, quantize: bool = True, spread: float = 0.2
) -> Params:
    """Draw parameters whose norm scales and biases are not the identity; NVFP4 or dense.

    `spread` is the standard deviation of norm scales (around 1), biases and embeddings: ones and
    zeros would hide a norm or a bias that is left out.
    """
    weights_key, spread_key = jax.random.split(key)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("/weight"):
            return leaf
        leaf_key = jax.random.fold_in(spread_key, sum(name.encode()))
        centre = 1.0 if "norm" in name else 0.0
        return centre + spread * jax.random.normal(leaf_key, leaf.shape, leaf.dtype)

    params = jax.tree_util.tree_map_with_path(draw, init_params(weights_key, config))
    return quantize_params(params) if quantize else params


def tiny_adapter(key: Key[Array, ""], params: Params, *, rank: int = 4) -> LoraAdapter:
    """Draw an adapter on every projection with b not zero, so that it changes the model."""
    a_key, b_key = jax.random.split(key)
    targets = lora_targets(params)
    adapter = init_lora(a_key, params, targets=targets, rank=rank, alpha=2.0 * rank)
    filled = {}
    for target_key, (name, pair) in zip(
        jax.random.split(b_key, len(targets)), adapter.pairs.items(), strict=True
    ):
        b = 0.1 * jax.random.normal(target_key, pair["b"].shape, pair["b"].dtype)
        filled[name] = {"a": pair["a"], "b": b}
    return adapter.replace(pairs=filled)


def random_tokens(
    key: Key[Array, ""], config: DecoderConfig, *, batch: int, prompt: int, completion: int
) -> TokenBatch:
    """Draw rows of random tokens, prompts and completions of 1 to `prompt` and `completion`."""
    ids_key, prompt_key, completion_key = jax.random.split(key, 3)
    ids = jax.random.randint(ids_key, (batch, prompt + completion), 0, config.vocab_size)
    prompt_lengths = jax.random.randint(prompt_key, (batch,), 1, prompt + 1)
    lengths = jax.random.randint(completion_key, (batch,), 1, completion + 1)
    from_left = jnp.broadcast_to(jnp.arange(prompt), (batch, prompt))
    return TokenBatch(
        prompt_ids=ids[:, :prompt],
        prompt_mask=from_left >= prompt - prompt_lengths[:, None],
        completion_ids=ids[:, prompt:],
        completion_mask=np.arange(completion)[None, :] < lengths[:, None],
    )


def toy_prompts(
    tokenizer: Any, *, size: int, part: str = "train", operation: str = "addition", seed: int = 0
) -> tuple[Prompt, ...]:
    """Return tokenized arithmetic problems with their answers, e.g. "17+58=" with "75"."""
    examples = arithmetic_examples(operation, size=size, seed=seed, task={}, part=part)
    prompts, _ = encode_prompts(
        examples,
        tokenizer,
        prompt_template="{question}",
        chat_template=False,
        system_prompt=None,
        max_prompt_tokens=128,
    )
    return prompts
