"""Pretrain the embedded model on additions, most of them done as a beginner does: without carrying.

    python scripts/pretrain_tiny.py --out tiny_model

Every problem is shown with the answer of one of two procedures, chosen anew each time: column by
column without a carry (probability 0.8), or right. The model learns both and which is the more
common. Its greedy answers then forget the carry, while reinforcement learning has something to
find. Only the generator's part "train" is used, so its part "eval" is held out from this too.

Seeded: one machine and one jax version give the same weights, others nearly the same.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qerl_jax.base_model import load_weights, open_model
from qerl_jax.data import arithmetic_examples, decode_completion, left_pad, load_tokenizer
from qerl_jax.hf_files import write_json
from qerl_jax.models import decoder_config_from_hf, forward, init_params
from qerl_jax.models.hf_save import save_dense
from qerl_jax.sampling import SamplingConfig, generate

SPECIAL = ("<pad>", "<eos>")
PAD, END = 0, 1

HF_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 272,  # 258 tokens, filled up to a multiple of 16
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": None,
}
NO_CARRY = 0.8  # probability of the wrong procedure


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one token a byte, so one a digit, and the ids that generation needs.

    It is a Qwen2 tokenizer without merges: transformers gives every qwen2 folder that class,
    whatever its tokenizer_config.json says.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokens = (*SPECIAL, *sorted(ByteLevel.alphabet()))
    Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token=None,
        padding_side="left",
        model_max_length=HF_CONFIG["max_position_embeddings"],
    ).save_pretrained(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": END, "pad_token_id": PAD})


def without_carry(question: str) -> str:
    """Add "57+68=" column by column without carrying: "15"."""
    first, second = map(int, question.rstrip("=").split("+"))
    return str((first // 10 + second // 10) % 10 * 10 + (first % 10 + second % 10) % 10)


def encode(examples, tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask of answer tokens, [2, examples, time]; index 0 has the right answers."""
    answers = [e.answer for e in examples], [without_carry(e.question) for e in examples]
    prompts = [tokenizer(e.question)["input_ids"] for e in examples]
    width = max(map(len, prompts)) + 4
    ids = np.full((2, len(examples), width), PAD, np.int32)
    mask = np.zeros(ids.shape, bool)
    for procedure, row in np.ndindex(mask.shape[:2]):
        start = len(prompts[row])
        answer = [*tokenizer(answers[procedure][row])["input_ids"], END]
        ids[procedure, row, : start + len(answer)] = prompts[row] + answer
        mask[procedure, row, start : start + len(answer)] = True
    return ids, mask


def answer_logprobs(params, ids, mask, *, config):
    """Log-probability of each answer token, [batch, time - 1]; 0 elsewhere."""
    hidden, _ = forward(params, None, ids[:, :-1], jnp.ones_like(ids[:, :-1], bool), config=config)
    # Not models.head: there the embedding is frozen.
    logits = jnp.einsum("bte,ve->btv", hidden, params["embed_tokens"])
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(mask[:, 1:], picked, 0.0)


def train(ids, mask, *, config, steps: int, batch_size: int, learning_rate: float, seed: int):
    """Fit random parameters by AdamW; print the loss (nats per answer token) now and then."""
    init_key, run_key = jax.random.split(jax.random.key(seed))
    params = init_params(init_key, config)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, min(100, steps // 10), steps, learning_rate / 100
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.1)
    )
    ids, mask = jnp.asarray(ids), jnp.asarray(mask)

    def loss_fn(params, ids, mask):
        return -jnp.sum(answer_logprobs(params, ids, mask, config=config)) / jnp.sum(mask)

    def step(carry, key):
        params, state = carry
        row_key, procedure_key = jax.random.split(key)
        rows = jax.random.randint(row_key, (batch_size,), 0, ids.shape[1])
        procedure = jax.random.bernoulli(procedure_key, NO_CARRY, (batch_size,)).astype(jnp.int32)
        batch = ids[procedure, rows], mask[procedure, rows]
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    run = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys))
    carry, started, stride = (params, optimizer.init(params)), time.perf_counter(), 100
    for first in range(0, steps, stride):
        keys = jax.random.split(jax.random.fold_in(run_key, first), min(stride, steps - first))
        carry, losses = run(carry, keys)
        done, loss = first + len(keys), float(jnp.mean(losses))
        if done % (5 * stride) == 0 or done == steps:
            seconds = time.perf_counter() - started
            print(f"step {done}/{steps}  loss {loss:.4f}  {seconds:.0f} s", flush=True)
    return carry[0]


def measure(folder: Path, examples) -> dict[str, float]:
    """Measure accuracy on examples: expected at temperature 1, and greedy; dense and NVFP4."""
    model, report = open_model(str(folder), dtype="float32", remat=False), {}
    ids, mask = encode(examples, model.tokenizer)
    carries = np.array([without_carry(e.question) != e.answer for e in examples])
    for name, quantize in (("dense", False), ("nvfp4", True)):
        params = load_weights(model, quantize=quantize, scale_rounding="float32")
        read = jax.jit(partial(answer_logprobs, config=model.config))
        right, wrong = (np.exp(read(params, i, m).sum(1)) for i, m in zip(ids, mask, strict=True))
        report |= {
            f"{name}: right at temperature 1": right.mean(),
            f"{name}: right at temperature 1, problems with a carry": right[carries].mean(),
            f"{name}: no carry at temperature 1, problems with a carry": wrong[carries].mean(),
            f"{name}: right, greedy": np.mean(greedy(params, model, examples)),
        }
    return {key: round(float(value), 4) for key, value in report.items()}


def greedy(params, model, examples) -> list[bool]:
    """Tell which examples the most likely tokens answer right."""
    prompts = [model.tokenizer(e.question)["input_ids"] for e in examples]
    ids, mask = left_pad(prompts, max(map(len, prompts)), model.pad_id)
    sampling = SamplingConfig(
        max_completion_tokens=8, end_ids=model.end_ids, pad_id=model.pad_id, temperature=0.0
    )
    rows = jnp.arange(len(examples))
    out = generate(
        params, None, ids, mask, jax.random.key(0), rows, config=model.config, sampling=sampling
    )
    texts = [
        decode_completion(model.tokenizer, row[:length])
        for row, length in zip(np.asarray(out.ids), np.asarray(out.lengths), strict=True)
    ]
    return [text == e.answer for text, e in zip(texts, examples, strict=True)]


def main() -> None:
    """Write the model folder and print what it can do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = dataclasses.replace(decoder_config_from_hf(HF_CONFIG), remat=False)
    problems = partial(arithmetic_examples, "addition", size=None, seed=args.seed, task={})
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        ids, mask = encode(problems(part="train"), load_tokenizer(folder))
        settings = vars(args) | {"config": config}
        del settings["out"]
        params = train(ids, mask, **settings)
        save_dense(args.out, params, config, hf_config=HF_CONFIG, companions_from=folder)
    print(json.dumps(measure(args.out, problems(part="eval")), indent=2))


if __name__ == "__main__":
    main()
