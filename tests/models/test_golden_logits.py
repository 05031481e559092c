"""Logits of golden/tiny_qwen2, dense and as llmcompressor writes NVFP4, against transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.base_model import load_weights, open_model
from qerl_jax.inference import score
from qerl_jax.models import TokenBatch, completion_logprobs, forward
from qerl_jax.models.head import head_logits, head_weight
from qerl_jax.quant import NvFp4Tensor

VOCAB = 128
TOLERANCE = 1e-4  # absolute, on logits of up to about 8


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


@pytest.fixture(params=["dense", "ct_nvfp4a16"])
def case(request, golden, device):
    """Return (folder, token ids, expected logits)."""
    with np.load(golden / "tiny_qwen2/reference.npz") as arrays:
        ids, logits = arrays["input_ids"], arrays[f"{request.param}/logits_f32"]
    return golden / "tiny_qwen2" / request.param, ids, logits


def log_softmax(logits):
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def load(folder):
    model = open_model(str(folder), dtype="float32", text=False)
    return model, load_weights(model, quantize=False, scale_rounding="float32")


def test_logits(case):
    folder, ids, expected = case
    model, params = load(folder)
    packed = isinstance(params["layers"]["down_proj"]["weight"], NvFp4Tensor)
    assert packed == (folder.name == "ct_nvfp4a16")
    hidden, _ = forward(
        params, None, jnp.asarray(ids), jnp.ones(ids.shape, bool), config=model.config
    )
    got = head_logits(hidden.reshape(-1, model.config.embed), head_weight(params))
    np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=0, atol=TOLERANCE)


def test_the_two_references_differ(golden):
    """Where they did not, the test above could not tell NVFP4 from dense weights."""
    with np.load(golden / "tiny_qwen2/reference.npz") as arrays:
        gap = np.abs(arrays["dense/logits_f32"] - arrays["ct_nvfp4a16/logits_f32"]).max()
    assert gap > 100 * TOLERANCE


def test_trainer_logprobs(case):
    """The trainer's reading of the same rows, as a prompt of 10 and a completion of 14 tokens."""
    folder, ids, logits = case
    model, params = load(folder)
    ones = jnp.ones(ids.shape, bool)
    batch = TokenBatch(
        jnp.asarray(ids[:, :10]), ones[:, :10], jnp.asarray(ids[:, 10:]), ones[:, 10:]
    )
    got, entropy = completion_logprobs(params, None, batch, config=model.config, temperature=0.7)
    every = log_softmax(logits[:, 9:-1] / 0.7)
    expected = np.take_along_axis(every, ids[:, 10:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(got, expected, rtol=0, atol=2 * TOLERANCE)
    np.testing.assert_allclose(entropy, -(np.exp(every) * every).sum(-1), rtol=0, atol=1e-3)


def test_score_writes_the_same_logits(case, tmp_path):
    """All logits of every position and the log-probs of the tokens; the folder has no tokenizer."""
    folder, ids, expected = case
    rows = "".join(json.dumps({"ids": row.tolist()}) + "\n" for row in ids)
    (tmp_path / "in.jsonl").write_text(rows)
    score(
        model=str(folder),
        adapter=None,
        quantize=False,
        input=str(tmp_path / "in.jsonl"),
        output=str(tmp_path / "out.jsonl"),
        top_k=VOCAB,
        temperature=1.0,
    )
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    for row, line, logits in zip(ids, lines, expected, strict=True):
        record = json.loads(line)
        got = np.empty_like(logits)
        np.put_along_axis(got, np.array(record["top_ids"]), np.array(record["top_logits"]), axis=-1)
        np.testing.assert_allclose(got, logits, rtol=0, atol=TOLERANCE)
        assert (np.diff(record["top_logits"], axis=-1) <= 0).all()
        logprobs = np.take_along_axis(log_softmax(logits[:-1]), row[1:, None], axis=-1)[:, 0]
        np.testing.assert_allclose(record["logprobs"], logprobs, rtol=0, atol=2 * TOLERANCE)
        assert record["nll"] == pytest.approx(-logprobs.sum(), rel=1e-5)
