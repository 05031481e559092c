"""Real models, in float32, against what transformers says of them.

The folders are made by `qerl convert` from the GGUF files that tests/golden names:

    QERL_SMOLLM2_DIR=... QERL_QWEN25_CODER_15B_DIR=... pytest tests/checkpoints

SmolLM2 takes 1 GiB and a minute on two cores, Qwen2.5-Coder-1.5B 11 GiB and a few minutes.
"""

import json
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.base_model import load_weights, open_model
from qerl_jax.models.score import score_tokens
from qerl_jax.sampling import SamplingConfig, generate

SMOLLM2, QWEN = "QERL_SMOLLM2_DIR", "QERL_QWEN25_CODER_15B_DIR"
MODELS = {SMOLLM2: "smollm2_reference.json", QWEN: "qwen25coder15b_reference.json"}


# The first row of GSM8K's test split (MIT licence), question and solution.
GSM8K_ROW = (
    "Janet\u2019s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes "
    "muffins for her friends every day with four. She sells the remainder at the farmers' market "
    "daily for $2 per fresh duck egg. How much in dollars does she make every day at the farmers' "
    "market?\n"
    "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\n"
    "She makes 9 * 2 = $<<9*2=18>>18 every day at the farmer\u2019s market.\n"
    "#### 18"
)


@cache
def load(folder):
    model = open_model(str(folder), dtype="float32")
    return model, load_weights(model, quantize=False, scale_rounding="float32")


@cache
def scores(folder, ids):
    model, params = load(folder)
    tokens = jnp.array([ids], jnp.int32)
    return score_tokens(
        params,
        None,
        tokens,
        jnp.ones(tokens.shape, bool),
        config=model.config,
        temperature=1.0,
        top_k=64,
    )


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.checkpoint(name)) for name in MODELS])
def case(request, golden, checkpoint_dir):
    """Return (folder, reference)."""
    return checkpoint_dir, json.loads((golden / MODELS[request.param]).read_text())


def test_token_ids(case):
    folder, reference = case
    tokenizer = open_model(str(folder), dtype="float32").tokenizer
    encode = partial(tokenizer, add_special_tokens=False)
    for prompt in reference["prompts"]:
        assert encode(prompt["prompt"])["input_ids"] == prompt["input_ids"], prompt["name"]
    for check in reference.get("tokenizer_checks", ()):
        ids = encode(check["text"])["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == check["tokens"]


def test_top_logits(case):
    folder, reference = case
    for prompt in reference["prompts"]:
        got = scores(folder, tuple(prompt["input_ids"]))
        logits = dict(zip(got.top_ids[0, -1].tolist(), got.top_logits[0, -1].tolist(), strict=True))
        for token, expected in zip(prompt["top20_ids"], prompt["top20_logits"], strict=True):
            assert logits[token] == pytest.approx(expected, abs=5e-3, rel=0), prompt["name"]
        largest = got.top_ids[0, -1, :5].tolist()
        assert largest == prompt["top20_ids"][:5], prompt["name"]


def test_likelihoods(case):
    folder, reference = case
    for prompt in reference["prompts"]:
        got = scores(folder, tuple(prompt["input_ids"]))
        nll = -np.asarray(got.next_logprobs[0, :-1], np.float64)
        mean = prompt.get("mean_nll") or np.mean(prompt["token_nll"])
        assert nll.mean() == pytest.approx(mean, rel=1e-4), prompt["name"]
        if "token_nll" in prompt:
            np.testing.assert_allclose(nll, prompt["token_nll"], rtol=0, atol=1e-3)


@pytest.mark.checkpoint(QWEN)
def test_likelihood_of_a_gsm8k_row(golden, checkpoint_dir):
    """This tells whether the head is a matrix of its own: with a tied one it is 2.1320."""
    expected = json.loads((golden / MODELS[QWEN]).read_text())["mean_nll_text"]
    ids = load(checkpoint_dir)[0].tokenizer(GSM8K_ROW, add_special_tokens=False)["input_ids"]
    assert len(ids) == expected["tokens"]
    nll = -np.asarray(scores(checkpoint_dir, tuple(ids)).next_logprobs[0, :-1], np.float64)
    assert nll.mean() == pytest.approx(expected["separate_embeddings"], rel=1e-4)


def test_greedy_continuations(case):
    """Every reference token is the most likely one after those before it."""
    folder, reference = case
    for prompt in reference["prompts"]:
        if "greedy_ids" in prompt:
            ids, greedy = prompt["input_ids"], prompt["greedy_ids"]
            got = scores(folder, (*ids, *greedy))
            assert got.top_ids[0, len(ids) - 1 : -1, 0].tolist() == greedy, prompt["name"]


@pytest.mark.checkpoint(SMOLLM2)
def test_greedy_generation(golden, checkpoint_dir):
    """The token loop with its cache, to the end token and no further."""
    reference = json.loads((golden / MODELS[SMOLLM2]).read_text())
    model, params = load(checkpoint_dir)
    for prompt in reference["prompts"]:
        if "greedy_ids" not in prompt:
            continue
        ids = jnp.array([prompt["input_ids"]], jnp.int32)
        sampling = SamplingConfig(
            max_completion_tokens=len(prompt["greedy_ids"]) + 3,
            end_ids=model.end_ids,
            pad_id=model.pad_id,
            temperature=0.0,
        )
        out = generate(
            params,
            None,
            ids,
            jnp.ones(ids.shape, bool),
            jax.random.key(0),
            jnp.arange(1),
            config=model.config,
            sampling=sampling,
        )
        assert out.ids[0, : int(out.lengths[0])].tolist() == prompt["greedy_ids"], prompt["name"]
        assert bool(out.finished[0])
