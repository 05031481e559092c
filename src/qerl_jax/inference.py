"""Scoring and generation with a loaded model: what `qerl score` and `qerl generate` do."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from qerl_jax.base_model import ModelFolder, check_ids, load_weights, open_model
from qerl_jax.data import Example, Prompt, build_prompt, decode_completion, left_pad
from qerl_jax.lora import LoraAdapter, Trainable, overlay_norms
from qerl_jax.metrics import read_rows, write_lines
from qerl_jax.models import abstract_params
from qerl_jax.models.score import score_tokens
from qerl_jax.output import check_output
from qerl_jax.peft import import_adapter
from qerl_jax.protocols import Params
from qerl_jax.sampling import SamplingConfig
from qerl_jax.sampling import generate as sample

GENERATE_ROWS = 64  # completions generated at once


@dataclass(frozen=True)
class LoadedModel:
    """A model for inference, and the adapter on it."""

    folder: ModelFolder
    params: Params
    trainable: Trainable | None

    @property
    def policy(self) -> Params:
        return overlay_norms(self.params, self.trainable) if self.trainable else self.params

    @property
    def adapter(self) -> LoraAdapter | None:
        return self.trainable.adapter if self.trainable else None


def _load(folder: ModelFolder, adapter: str | None, *, quantize: bool) -> LoadedModel:
    # The adapter first: it is small, and a wrong one is refused before the weights are read.
    trainable = None
    if adapter is not None:
        trainable = import_adapter(adapter, abstract_params(folder.config), field="--adapter")
    params = load_weights(folder, quantize=quantize, scale_rounding="float32")
    return LoadedModel(folder, params, trainable)


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
    """Score JSONL rows of texts or token ids: log-probs of the tokens, top-k logits.

    Raises ValueError naming the line at fault; nothing is written then.
    """
    check_output(output, sources={"--in": input, "--model": model, "--adapter": adapter})
    rows = list(read_rows(input))
    if not rows:
        raise ValueError(f"{'standard input' if input == '-' else input}: holds no rows")
    folder = open_model(model, dtype=dtype, text=any("ids" not in row for _, row in rows))
    if top_k > folder.config.vocab_size:
        raise ValueError(f"--top-k: {top_k} exceeds {folder.config.vocab_size}, the vocabulary")
    encoded = [_row_ids(row, folder, place) for place, row in rows]
    loaded = _load(folder, adapter, quantize=quantize)
    records = [_score_row(loaded, ids, top_k=top_k, temperature=temperature) for ids in encoded]
    write_lines(output, records)


def _row_ids(row: Mapping[str, Any], folder: ModelFolder, place: str) -> list[int]:
    limit = folder.config.max_positions
    if "ids" in row:
        ids = row["ids"]
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise ValueError(f"{place}: ids must be a list of integers")
    elif isinstance(row.get("text"), str):
        ids = list(folder.tokenizer(row["text"], add_special_tokens=False)["input_ids"])
    else:
        raise ValueError(f'{place}: needs "text" (a string) or "ids" (a list of integers)')
    if not 1 <= len(ids) <= limit:
        raise ValueError(f"{place}: {len(ids)} tokens; 1 to {limit} are allowed")
    check_ids(ids, folder, place)
    return ids


def _score_row(
    loaded: LoadedModel, ids: list[int], *, top_k: int, temperature: float
) -> dict[str, Any]:
    width = max(64, 1 << (len(ids) - 1).bit_length())  # few widths, so few compilations
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(ids)] = ids
    scores = score_tokens(
        loaded.policy,
        loaded.adapter,
        jnp.asarray(padded),
        jnp.asarray(np.arange(width)[None, :] < len(ids)),
        config=loaded.folder.config,
        temperature=temperature,
        top_k=max(top_k, 1),
    )
    logprobs = _floats(scores.next_logprobs[0, : len(ids) - 1])
    if not np.isfinite(logprobs).all():
        raise ValueError(
            f"{loaded.folder.path}: its log-probs are not finite in {loaded.folder.config.dtype}"
        )
    record = {"ids": ids, "logprobs": logprobs, "nll": _total(-value for value in logprobs)}
    if top_k:
        record["top_ids"] = np.asarray(scores.top_ids[0, : len(ids)]).tolist()
        record["top_logits"] = [_floats(row) for row in scores.top_logits[0, : len(ids)]]
    return record


def _floats(values: Array | np.ndarray) -> list[float]:
    """Convert float32 numbers to the shortest decimals that are read back as the same float32."""
    return [float(str(value)) for value in np.asarray(values, np.float32)]


def _total(values: Iterable[float]) -> float:
    return _floats(np.array([math.fsum(values)]))[0]


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
    """Print completions of prompts given as texts or as JSONL rows {"prompt": ...}.

    Raises ValueError naming the prompt at fault; nothing is printed then.
    """
    texts = [(f"prompt {number}", text) for number, text in enumerate(prompts, start=1)]
    texts += [(place, _prompt_text(row, place)) for place, row in read_rows(input)]
    if not texts:
        raise ValueError("generate: no prompt given (--prompt TEXT or --in FILE)")
    folder = open_model(model, dtype=dtype)
    if chat and not folder.tokenizer.chat_template:
        raise ValueError(f"--chat: {folder.path} has no chat template")
    encoded = [_encode(text, folder, max_tokens, place, chat=chat) for place, text in texts]
    loaded = _load(folder, adapter, quantize=quantize)
    sampling = SamplingConfig(
        max_completion_tokens=max_tokens,
        end_ids=folder.end_ids,
        pad_id=folder.pad_id,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    rows = [prompt for prompt in encoded for _ in range(n)]
    for record in _complete(rows, loaded, sampling, seed):
        print(json.dumps(record, ensure_ascii=False), flush=True)


def _prompt_text(row: Mapping[str, Any], place: str) -> str:
    if not isinstance(row.get("prompt"), str):
        raise ValueError(f'{place}: needs "prompt" (a string)')
    return row["prompt"]


def _encode(text: str, folder: ModelFolder, max_tokens: int, place: str, *, chat: bool) -> Prompt:
    shown, ids = build_prompt(
        Example(question=text, answer=""),
        prompt_template="{question}",
        chat_template=chat,
        system_prompt=None,
        tokenizer=folder.tokenizer,
    )
    if not ids:
        raise ValueError(f"{place}: holds no token")
    check_ids(ids, folder, place)
    limit = folder.config.max_positions
    if len(ids) + max_tokens > limit:
        raise ValueError(
            f"{place}: {len(ids)} tokens and --max-tokens {max_tokens} exceed the model's "
            f"context of {limit} tokens"
        )
    return Prompt(text=shown, ids=tuple(ids), answer="")


def _complete(
    rows: Sequence[Prompt], loaded: LoadedModel, sampling: SamplingConfig, seed: int
) -> Iterator[dict[str, Any]]:
    """Complete rows in batches of one shape; the last is filled up with repeats."""
    width, size = max(len(row.ids) for row in rows), min(len(rows), GENERATE_ROWS)
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        filled = [*batch, *([batch[-1]] * (size - len(batch)))]
        ids, mask = left_pad([row.ids for row in filled], width, loaded.folder.pad_id)
        out = sample(
            loaded.policy,
            loaded.adapter,
            jnp.asarray(ids),
            jnp.asarray(mask),
            jax.random.key(seed),
            jnp.arange(start, start + size),
            config=loaded.folder.config,
            sampling=sampling,
        )
        out = jax.device_get(out)
        for row, prompt in enumerate(batch):
            length = int(out.lengths[row])
            ids = out.ids[row, :length]
            yield {
                "prompt": prompt.text,
                "completion": decode_completion(loaded.folder.tokenizer, ids),
                "tokens": length,
                "finish_reason": "stop" if out.finished[row] else "length",
                "logprob": _total(_floats(out.logprobs[row, :length])),
            }
