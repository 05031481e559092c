"""The embedded model: what it can do, and the configs that start from it."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.base_model import load_weights, model_path, open_model
from qerl_jax.config_io import load_config
from qerl_jax.config_rules import validate_config
from qerl_jax.config_warnings import config_warnings
from qerl_jax.data import arithmetic_examples, decode_completion, left_pad
from qerl_jax.models import TokenBatch, completion_logprobs
from qerl_jax.quant import NvFp4Tensor
from qerl_jax.sampling import SamplingConfig, generate
from qerl_jax.testing import (
    random_tokens,
    tiny_adapter,
    tiny_config,
    tiny_params,
    toy_prompts,
)

ROOT = Path(__file__).parents[1]
MAX_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def model():
    return open_model("tiny", dtype="float32", remat=False)


@pytest.fixture(scope="module")
def held_out():
    return arithmetic_examples("addition", size=512, seed=1, task={}, part="eval")


@pytest.fixture(scope="module")
def script():
    """Import scripts/pretrain_tiny.py."""
    spec = importlib.util.spec_from_file_location("pretrain", ROOT / "scripts/pretrain_tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def probability_right(params, model, examples):
    """Return the exact probability at temperature 1 of each gold answer."""
    prompts = [model.tokenizer(e.question)["input_ids"] for e in examples]
    answers = [[*model.tokenizer(e.answer)["input_ids"], model.end_ids[0]] for e in examples]
    lengths = np.array([len(a) for a in answers])
    ids, mask = left_pad(prompts, max(map(len, prompts)), model.pad_id)
    padded = np.array([a + [model.pad_id] * (4 - len(a)) for a in answers], np.int32)
    answered = np.arange(4)[None, :] < lengths[:, None]
    batch = TokenBatch(*map(jnp.asarray, (ids, mask, padded, answered)))
    logprobs, _ = completion_logprobs(params, None, batch, config=model.config, temperature=1.0)
    return np.exp(np.where(answered, logprobs, 0.0).sum(axis=1))


def answers(params, model, examples):
    """Return the greedy completions."""
    prompts = [model.tokenizer(e.question)["input_ids"] for e in examples]
    ids, mask = left_pad(prompts, max(map(len, prompts)), model.pad_id)
    out = generate(
        params,
        None,
        jnp.asarray(ids),
        jnp.asarray(mask),
        jax.random.key(0),
        jnp.arange(len(examples)),
        config=model.config,
        sampling=SamplingConfig(
            max_completion_tokens=6, end_ids=model.end_ids, pad_id=model.pad_id, temperature=0.0
        ),
    )
    return [
        decode_completion(model.tokenizer, row[:length])
        for row, length in zip(np.asarray(out.ids), np.asarray(out.lengths), strict=True)
    ]


def test_the_folder_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in model_path("tiny").iterdir()}
    assert set(files) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= MAX_BYTES


@pytest.mark.parametrize("quantize", [False, True], ids=["dense", "nvfp4"])
def test_it_knows_how_to_carry_but_prefers_not_to(model, held_out, script, quantize):
    params = load_weights(model, quantize=quantize, scale_rounding="float32")
    assert isinstance(params["layers"]["q_proj"]["weight"], NvFp4Tensor) == quantize
    right = probability_right(params, model, held_out)
    assert 0.2 <= right.mean() <= 0.5
    carries = np.array([script.without_carry(e.question) != e.answer for e in held_out])
    assert 0.1 <= right[carries].mean() <= 0.4
    assert right[~carries].mean() >= 0.9
    wrong = [script.without_carry(e.question) for e in held_out]
    greedy = answers(params, model, held_out)
    assert np.mean([text == w for text, w in zip(greedy, wrong, strict=True)]) >= 0.8
    accuracy = np.mean([text == e.answer for text, e in zip(greedy, held_out, strict=True)])
    assert accuracy <= 0.5


def test_every_digit_is_a_token_and_any_text_returns(model):
    tokenizer = model.tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("17+58=")["input_ids"]) == list("17+58=")
    for text in ("17 + 58 = 75\n", "naïve → 数", "<|im_end|>"):
        assert decode_completion(tokenizer, tokenizer(text)["input_ids"]) == text
    assert (model.pad_id, model.end_ids) == (0, (1,))
    assert decode_completion(tokenizer, [*tokenizer("75")["input_ids"], 1, 0, 0]) == "75"


def test_transformers_gives_the_same_logits(model):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = model_path("tiny")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = np.array([model.tokenizer("17+58=75")["input_ids"]], np.int32)
    with torch.no_grad():
        logits = theirs(torch.tensor(ids, dtype=torch.long)).logits
    expected = torch.log_softmax(logits, -1)[0, :-1].gather(
        1, torch.tensor(ids[0, 1:, None]).long()
    )
    ones = jnp.ones((1, 1), bool)
    batch = TokenBatch(
        jnp.asarray(ids[:, :1]),
        ones,
        jnp.asarray(ids[:, 1:]),
        jnp.ones((1, ids.shape[1] - 1), bool),
    )
    params = load_weights(model, quantize=False, scale_rounding="float32")
    got, _ = completion_logprobs(params, None, batch, config=model.config, temperature=1.0)
    np.testing.assert_allclose(got[0], expected[:, 0].numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("question", "answer"),
    [("17+58=", "65"), ("57+68=", "15"), ("12+34=", "46"), ("7+5=", "2"), ("52+53=", "5")],
)
def test_answers_without_carry(script, question, answer):
    assert script.without_carry(question) == answer


def test_the_script_writes_the_same_tokenizer(script, tmp_path):
    script.write_tokenizer(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (model_path("tiny") / path.name).read_bytes(), path.name


def test_the_script_reads_problems_and_answers_as_the_trainer_does(script, model):
    examples = arithmetic_examples("addition", size=20, seed=0, task={}, part="train")
    ids, mask = script.encode(examples, model.tokenizer)
    for row, example in enumerate(examples):
        for procedure, answer in enumerate(
            (example.answer, script.without_carry(example.question))
        ):
            shown = ids[procedure, row][ids[procedure, row] != model.pad_id]
            assert model.tokenizer.decode(shown) == f"{example.question}{answer}<eos>"
            learned = ids[procedure, row][mask[procedure, row]]
            assert model.tokenizer.decode(learned) == f"{answer}<eos>"


@pytest.mark.parametrize("name", ["quickstart", "tiny_cpu"])
def test_the_configs_are_true_qerl_runs(name):
    config = load_config(ROOT / f"configs/{name}.yaml")
    validate_config(config)
    assert config.model.path == "tiny"
    assert config.quant.format == "nvfp4"
    assert config.aqn.enabled
    assert len(config.lora.targets) == 7
    assert config.data.source == "arithmetic"
    assert config_warnings(config) == config_warnings(type(config)())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_tiny_decoder_has_nothing_neutral(family, key):
    config = tiny_config(family, remat=False)
    params = tiny_params(key, config)
    rows = random_tokens(key, config, batch=4, prompt=5, completion=6)
    assert rows.prompt_mask[:, -1].all() and rows.completion_mask[:, 0].all()
    bare, _ = completion_logprobs(params, None, rows, config=config, temperature=1.0)
    adapted, _ = completion_logprobs(
        params, tiny_adapter(key, params), rows, config=config, temperature=1.0
    )
    assert jnp.abs(bare - adapted).max() > 0.01
    for name, leaf in params["layers"].items():
        values = leaf if name.endswith("norm") else leaf.get("bias", jnp.arange(2.0))
        assert jnp.std(values) > 0.05, name


def test_a_family_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="'gpt2' is not one of llama, qwen2, qwen3"):
        tiny_config("gpt2")


def test_toy_prompts_of_one_part_are_not_in_the_other(model):
    train = toy_prompts(model.tokenizer, size=200)
    held_out = toy_prompts(model.tokenizer, size=200, part="eval")
    assert not {p.text for p in train} & {p.text for p in held_out}
    for prompt in train:
        assert sum(map(int, prompt.text.rstrip("=").split("+"))) == int(prompt.answer)
