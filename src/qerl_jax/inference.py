"""Scoring and generation with a loaded model: what `qerl score` and `qerl generate` do."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.base_model import ModelFolder, load_weights, open_model
from qerl_jax.data import Example, decode_completion, encode_prompts, left_pad
from qerl_jax.lora import Trainable, overlay_norms
from qerl_jax.metrics import read_rows, write_lines
from qerl_jax.models.score import score_tokens
from qerl_jax.peft import import_adapter
from qerl_jax.protocols import Params
from qerl_jax.sampling import SamplingConfig
from qerl_jax.sampling import generate as sample


@dataclass(frozen=True)
class LoadedModel:
    """A model for inference, and the adapter on it."""

    folder: ModelFolder
    params: Params
    trainable: Trainable | None

    @property
    def policy(self) -> Params:
        return overlay_norms(self.params, self.trainable) if self.trainable else self.params


def _load(model: str, adapter: str | None, *, quantize: bool, dtype: str) -> LoadedModel:
    folder = open_model(model, dtype=dtype)
    params = load_weights(folder, quantize=quantize, scale_rounding="float32")
    return LoadedModel(folder, params, import_adapter(adapter, params) if adapter else None)


def score(
    *,
    model: str,
    adapter: str | None,
    quantize: bool,
    input: str,
    output: str,
    top_k: int,
    temperature: float,
    dtype: str = "float32",
) -> None:
    """Score JSONL rows of texts or token ids: log-probs of the tokens, top-k logits."""
    loaded = _load(model, adapter, quantize=quantize, dtype=dtype)
    config = loaded.folder.config
    rows = []
    for place, row in read_rows(input):
        ids = _row_ids(row, loaded.folder, place)
        if not 1 <= len(ids) <= config.max_positions:
            raise ValueError(f"{place}: {len(ids)} tokens; 1 to {config.max_positions} are allowed")
        rows.append(ids)
    records = [_score_row(loaded, ids, top_k=top_k, temperature=temperature) for ids in rows]
    write_lines(output, records)


def _score_row(loaded: LoadedModel, ids: list[int], *, top_k: int, temperature: float):
    width = -(-len(ids) // 64) * 64  # few widths, so few compilations
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(ids)] = ids
    scores = score_tokens(
        loaded.policy,
        loaded.trainable.adapter if loaded.trainable else None,
        jnp.asarray(padded),
        jnp.asarray(np.arange(width)[None, :] < len(ids)),
        config=loaded.folder.config,
        temperature=temperature,
        top_k=max(top_k, 1),
    )
    logprobs = [float(value) for value in scores.next_logprobs[0, : len(ids) - 1]]
    record = {"ids": ids, "logprobs": logprobs, "nll": -sum(logprobs)}
    if top_k:
        record["top_ids"] = np.asarray(scores.top_ids[0, : len(ids)]).tolist()
        record["top_logits"] = np.asarray(scores.top_logits[0, : len(ids)]).tolist()
    return record


def _row_ids(row: Mapping[str, Any], folder: ModelFolder, place: str) -> list[int]:
    if "ids" in row:
        ids, vocab = row["ids"], folder.config.vocab_size
        whole = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab for i in ids)
        if not whole:
            raise ValueError(f"{place}: ids must be a list of integers from 0 to {vocab - 1}")
        return ids
    if not isinstance(row.get("text"), str):
        raise ValueError(f'{place}: needs "text" (a string) or "ids" (a list of integers)')
    return folder.tokenizer(row["text"], add_special_tokens=False)["input_ids"]


def generate(
    *,
    model: str,
    adapter: str | None,
    quantize: bool,
    prompts: Sequence[str],
    input: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    chat: bool,
    n: int,
    dtype: str = "float32",
) -> None:
    """Print completions of prompts given as texts or as JSONL rows {"prompt": ...}."""
    texts = list(prompts) + [_prompt_text(row, place) for place, row in read_rows(input)]
    if not texts:
        raise ValueError("generate: no prompt given (--prompt TEXT or --in FILE)")
    loaded = _load(model, adapter, quantize=quantize, dtype=dtype)
    folder = loaded.folder
    encoded, _ = encode_prompts(
        [Example(question=text, answer="") for text in texts],
        folder.tokenizer,
        prompt_template="{question}",
        chat_template=chat,
        system_prompt=None,
        max_prompt_tokens=folder.config.max_positions - max_tokens,
    )
    rows = [prompt for prompt in encoded for _ in range(n)]
    ids, mask = left_pad([p.ids for p in rows], max(len(p.ids) for p in rows), folder.pad_id)
    out = sample(
        loaded.policy,
        loaded.trainable.adapter if loaded.trainable else None,
        jnp.asarray(ids),
        jnp.asarray(mask),
        jax.random.key(seed),
        jnp.arange(len(rows)),
        config=folder.config,
        sampling=SamplingConfig(
            max_completion_tokens=max_tokens,
            end_ids=folder.end_ids,
            pad_id=folder.pad_id,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        ),
    )
    for row, prompt in enumerate(rows):
        length = int(out.lengths[row])
        record = {
            "prompt": prompt.text,
            "completion": decode_completion(folder.tokenizer, np.asarray(out.ids[row, :length])),
            "tokens": length,
            "finish_reason": "stop" if bool(out.finished[row]) else "length",
            "logprob": float(np.sum(out.logprobs[row, :length])),
        }
        print(json.dumps(record, ensure_ascii=False))


def _prompt_text(row: Mapping[str, Any], place: str) -> str:
    if not isinstance(row.get("prompt"), str):
        raise ValueError(f'{place}: needs "prompt" (a string)')
    return row["prompt"]
