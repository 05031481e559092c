"""Questions with gold answers, prompts in tokens, and resumable batches."""

from qerl_jax.data.arithmetic import OPERATIONS, arithmetic_examples
from qerl_jax.data.batches import DataState, epoch_order, next_batch
from qerl_jax.data.examples import Example, Fields
from qerl_jax.data.load import SOURCES, load_examples
from qerl_jax.data.prompts import Prompt, build_prompt, encode_prompts, left_pad
from qerl_jax.data.sources import hub_examples, jsonl_examples, reasoning_gym_examples
from qerl_jax.data.tokenizer import (
    configured_end_ids,
    decode_completion,
    end_token_ids,
    load_tokenizer,
)

__all__ = [
    "OPERATIONS",
    "SOURCES",
    "DataState",
    "Example",
    "Fields",
    "Prompt",
    "arithmetic_examples",
    "build_prompt",
    "configured_end_ids",
    "decode_completion",
    "encode_prompts",
    "end_token_ids",
    "epoch_order",
    "hub_examples",
    "jsonl_examples",
    "left_pad",
    "load_examples",
    "load_tokenizer",
    "next_batch",
    "reasoning_gym_examples",
]
