"""GGUF files into Hugging Face folders. The files are written here as llama.cpp writes them."""

import json
import sys

import ml_dtypes
import numpy as np
import pytest

from qerl_jax.hf_files import list_tensors, read_tensor
from qerl_jax.models import decoder_config_from_hf
from qerl_jax.models.convert import convert_gguf
from qerl_jax.models.hf import load_params

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_alphabet():
    """List the 256 characters that GPT-2's byte-level vocabulary spells bytes with."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b if b in plain else 256 + i) for b, i in zip(plain, plain, strict=True)] + [
        chr(256 + i) for i in range(256 - len(plain))
    ]


def permute(weight, heads):
    """Reorder the rows of q or k as llama.cpp's converter does for llama files."""
    pairs = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def random_weights(*, seed=0, untied=False, bias=False, layers=2, vocab=261):
    """Draw the weights of a tiny model under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    kv = KV_HEADS * HEAD_DIM
    shapes = {"model.embed_tokens": (vocab, HIDDEN), "model.norm": (HIDDEN,)}
    if untied:
        shapes["lm_head"] = (vocab, HIDDEN)
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"{at}.self_attn.k_proj": (kv, HIDDEN),
        }
        shapes |= {
            f"{at}.self_attn.v_proj": (kv, HIDDEN),
            f"{at}.self_attn.o_proj": (HIDDEN, HIDDEN),
        }
        shapes |= {f"{at}.mlp.gate_proj": (FFN, HIDDEN), f"{at}.mlp.up_proj": (FFN, HIDDEN)}
        shapes |= {f"{at}.mlp.down_proj": (HIDDEN, FFN)}
        shapes |= {f"{at}.{name}": (HIDDEN,) for name in BLOCK_NORMS}
    drawn = {f"{k}.weight": rng.standard_normal(s, np.float32) for k, s in shapes.items()}
    for i in range(layers if bias else 0):
        for name, n in (("q", HIDDEN), ("k", kv), ("v", kv)):
            key = f"model.layers.{i}.self_attn.{name}_proj.bias"
            drawn[key] = 100 * rng.standard_normal(n, np.float32)
    return drawn


BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm")
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(key):
    module, leaf = key.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[module]}.{leaf}"
    return f"{GGUF_NAMES[module]}.{leaf}"


def write_gguf(path, weights, *, arch="llama", pre="smollm", extra=None, eps=1e-5, **scalars):
    """Write a GGUF file: matrices in Q8_0, vectors in float32; returns what it decodes to."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("Tiny")
    writer.add_block_count(sum(key.endswith("input_layernorm.weight") for key in weights))
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(eps)
    if arch == "llama":
        writer.add_rope_dimension_count(HEAD_DIM)
    tokens = [*SPECIAL, *byte_alphabet(), "ĠĠ", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, value in scalars.items():
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    decoded = {}
    for key, value in weights.items():
        stored = value
        if arch == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            stored = permute(value, HEADS if "q_proj" in key else KV_HEADS)
        if value.ndim == 1:
            writer.add_tensor(gguf_name(key), stored)
            decoded[key] = value
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(gguf_name(key), gguf.quants.quantize(stored, kind), raw_dtype=kind)
        # Blocks of Q8_0 lie within a row, so a permutation of rows commutes with them.
        decoded[key] = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def converted_tensors(folder):
    entries = list_tensors(folder / "model.safetensors")
    return {name: read_tensor(entry) for name, entry in entries.items()}


def assert_weights(folder, expected):
    found = converted_tensors(folder)
    assert set(found) == set(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value.astype(ml_dtypes.bfloat16), err_msg=key)


def refusal(path, out, **kwargs):
    with pytest.raises(ValueError) as caught:
        convert_gguf(path, out, **kwargs)
    assert not out.exists() and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """A tied llama file with SmolLM's pre-tokenizer, converted: (folder, what it decodes to)."""
    folder = tmp_path_factory.mktemp("smollm")
    decoded = write_gguf(folder / "tiny.gguf", random_weights())
    convert_gguf(folder / "tiny.gguf", folder / "out")
    return folder / "out", decoded


def test_llama_weights_with_the_permutation_undone(smollm):
    folder, decoded = smollm
    assert_weights(folder, decoded)
    key = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(permute(decoded[key], HEADS), decoded[key])


def test_config(smollm):
    config = json.loads((smollm[0] / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5  # not 9.999999747378752e-06
    assert config["tie_word_embeddings"] is True
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    decoder = decoder_config_from_hf(config)
    assert (decoder.embed, decoder.ffn, decoder.num_layers) == (HIDDEN, FFN, 2)
    assert (decoder.num_q_heads, decoder.num_kv_heads, decoder.head_dim) == (4, 2, 16)
    assert decoder.rope_theta == 10000.0 and decoder.max_positions == 128
    generation = json.loads((smollm[0] / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert "lm_head" not in load_params(smollm[0], decoder, quantize=False)


def test_tokenizer_splits_digits_and_keeps_double_spaces(smollm):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm[0])
    assert tokenizer.tokenize("a  5") == ["a", "ĠĠ", "5"]  # transformers alone: a, Ġ, Ġ, 5
    assert tokenizer.tokenize("12") == ["1", "2"]
    assert tokenizer("<|im_end|>a")["input_ids"][0] == 2
    assert tokenizer.decode(tokenizer("né <|im_end|>")["input_ids"]) == "né <|im_end|>"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "user: hi\n"


def test_other_pre_tokenizers_are_left_alone(tmp_path):
    write_gguf(tmp_path / "t.gguf", random_weights(layers=1), pre="gpt-2")
    convert_gguf(tmp_path / "t.gguf", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("12") == ["12"]


@pytest.mark.parametrize("tie", [False, True])
def test_qwen2_with_biases_and_its_own_head(tmp_path, tie):
    weights = random_weights(untied=True, bias=True)
    path, out = tmp_path / "t.gguf", tmp_path / "out"
    decoded = write_gguf(
        path, weights, arch="qwen2", pre="qwen2", eps=1e-6, **{"tokenizer.ggml.eot_token_id": 0}
    )
    convert_gguf(path, out, tie=tie)
    if tie:
        decoded["model.embed_tokens.weight"] = decoded.pop("lm_head.weight")
    assert_weights(out, decoded)
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is tie and config["rms_norm_eps"] == 1e-6
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    decoder = decoder_config_from_hf(config)
    bias = load_params(out, decoder, quantize=True)["layers"]["k_proj"]["bias"]
    expected = decoded["model.layers.1.self_attn.k_proj.bias"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bias[1], expected.astype(np.float32))


def llama3_factors(factor):
    """Divisors of the frequencies as llama.cpp's converter computes them."""
    factors = []
    for exponent in np.arange(0, HEAD_DIM, 2) / HEAD_DIM:
        wavelength = 2 * np.pi * 10000.0**exponent
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_rope_scaling_is_recovered(tmp_path):
    path, out = tmp_path / "t.gguf", tmp_path / "out"
    factors = llama3_factors(32.0)
    assert len(set(factors)) > 2  # all three branches of the formula
    write_gguf(path, random_weights(layers=1), extra={"rope_freqs.weight": factors})
    convert_gguf(path, out)
    scaling = decoder_config_from_hf(json.loads((out / "config.json").read_text())).rope_scaling
    assert (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == (32.0, 1.0, 4.0)
    assert scaling.original_max_position_embeddings == 8192
    factors[3] *= 1.01
    write_gguf(path, random_weights(layers=1), extra={"rope_freqs.weight": factors})
    message = refusal(path, tmp_path / "other")
    assert message == f"{path}: rope_freqs.weight is not the Llama 3 scaling"


def test_tensors_that_transformers_would_drop_are_refused(tmp_path):
    path = tmp_path / "t.gguf"
    write_gguf(path, random_weights(layers=1, bias=True))  # llama with q, k and v biases
    message = refusal(path, tmp_path / "out")
    assert message == f"{path}: 14 tensors, but a llama has 11"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_tensors_are_refused(tmp_path):
    path, weights = tmp_path / "t.gguf", random_weights(layers=1)
    del weights["model.layers.0.mlp.up_proj.weight"]
    write_gguf(path, weights)
    message = refusal(path, tmp_path / "out")
    assert message == f"{path}: no tensor for model.layers.0.mlp.up_proj.weight (1 absent)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arch": "gemma3"}, "architecture 'gemma3' is not one of ('llama', 'qwen2', 'qwen3')"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not one of ('default', "),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn' is not supported"),
    ],
)
def test_unsupported_files_are_refused_before_reading_weights(tmp_path, settings, message):
    write_gguf(tmp_path / "t.gguf", random_weights(layers=1), **settings)
    found = refusal(tmp_path / "t.gguf", tmp_path / "out")
    assert found.startswith(f"{tmp_path / 't.gguf'}: {message}")


def test_damaged_files_are_refused(tmp_path):
    path, out = tmp_path / "t.gguf", tmp_path / "out"
    assert refusal(path, out) == f"{path}: no such file"
    write_gguf(path, random_weights(layers=1))
    whole = path.read_bytes()
    for damaged in (b"", b"not a GGUF file", whole[:100], whole[: len(whole) // 2], whole[:-64]):
        path.write_bytes(damaged)
        assert refusal(path, out).startswith(f"{path}: not a complete GGUF file (")


def test_an_existing_folder_is_left_alone(tmp_path):
    write_gguf(tmp_path / "t.gguf", random_weights(layers=1))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    with pytest.raises(ValueError, match=r"out: already exists$"):
        convert_gguf(tmp_path / "t.gguf", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize("package", ["gguf", "torch"])
def test_missing_extra_names_the_command(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(tmp_path / "t.gguf", tmp_path / "out") == (
        f"convert: the package {package} is missing; run: pip install -e '.[gguf]'"
    )
