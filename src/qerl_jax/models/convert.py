"""GGUF file -> Hugging Face folder, through transformers, gguf and torch (the extra `gguf`)."""

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.hf_files import new_folder, write_json

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Pre-tokenizers that transformers rebuilds from the file's metadata, and "smollm", mended here.
_PRE_TOKENIZERS = (
    "default",
    "deepseek-r1-qwen",
    "gpt-2",
    "llama-bpe",
    "llama-v3",
    "llama3",
    "qwen2",
    "smollm",
)
_NOT_CONFIG = (
    "_model_name_or_path",
    "_name_or_path",
    "quantization_config",
    "transformers_version",
)


def convert_gguf(
    gguf_path: str | os.PathLike, out_dir: str | os.PathLike, *, tie: bool = False
) -> None:
    """Write the model and tokenizer of a GGUF file as a bfloat16 Hugging Face folder.

    The weights are dequantized, and the row permutation of q and k in llama files is undone
    (by transformers). A file with an output matrix gives an untied model; `tie=True` drops its
    embedding and uses the output matrix, stored at the higher precision, for both. That is right
    only where the original model is tied, as the small Qwen2.5 are.

    Raises:
        ValueError: if the extra `gguf` is not installed, the file is damaged or of an unsupported
            kind, or `out_dir` exists.
    """
    _require_extra()
    path = Path(gguf_path)
    metadata, tensor_names, rope_factors = _read_metadata(path)
    _check_supported(path, metadata)
    rope = _rope_parameters(path, metadata, rope_factors)
    with new_folder(out_dir) as folder:
        config = _write_weights(path, folder, metadata, tensor_names, tie=tie, rope=rope)
        _write_generation_config(folder, config, metadata)
        _write_tokenizer(path, folder, metadata)


def _require_extra() -> None:
    try:
        import gguf  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"convert: the package {error.name} is missing; run: pip install -e '.[gguf]'"
        ) from error


def _read_metadata(path: Path) -> tuple[dict[str, Any], list[str], np.ndarray | None]:
    """Return (scalar metadata, tensor names, values of rope_freqs.weight if there is one)."""
    import gguf

    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        reader = gguf.GGUFReader(path)
        scalars = {name: f.contents() for name, f in reader.fields.items() if len(f.types) == 1}
        names = [t.name for t in reader.tensors]
        factors = [np.array(t.data) for t in reader.tensors if t.name == "rope_freqs.weight"]
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a complete GGUF file ({error})") from error
    return scalars, names, factors[0] if factors else None


def _check_supported(path: Path, metadata: Mapping[str, Any]) -> None:
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{path}: architecture {architecture!r} is not one of {ARCHITECTURES}")
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and pre not in _PRE_TOKENIZERS:
        raise ValueError(f"{path}: tokenizer.ggml.pre {pre!r} is not one of {_PRE_TOKENIZERS}")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"{path}: {architecture}.rope.scaling.type {scaling!r} is not supported")


def _rope_parameters(
    path: Path, metadata: Mapping[str, Any], factors: np.ndarray | None
) -> dict[str, Any] | None:
    """Return Llama 3 rope scaling, which a GGUF holds only as one divisor a frequency.

    Transformers ignores that tensor. All released Llama 3.x share three of the four constants;
    the fourth is the largest divisor, and the formula then has to give back the whole tensor.
    """
    if factors is None:
        return None
    name = metadata["general.architecture"]
    theta = float(metadata.get(f"{name}.rope.freq_base", 10000.0))
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * theta ** (np.arange(factors.size) / factors.size)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(expected, factors, rtol=1e-4):
        raise ValueError(f"{path}: rope_freqs.weight is not the Llama 3 scaling")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _write_weights(
    path: Path,
    folder: Path,
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    *,
    tie: bool,
    rope: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Write model.safetensors and config.json; return the latter."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        local_files_only=True,
        output_loading_info=True,
    )
    config = _hf_config(model, metadata, rope)
    # save_pretrained refuses a model that came from GGUF, so the tensors are written directly.
    state = model.state_dict()
    if config["tie_word_embeddings"]:
        del state["lm_head.weight"]
    absent = sorted(set(info["missing_keys"]) & set(state))
    if absent:
        raise ValueError(f"{path}: no tensor for {absent[0]} ({len(absent)} absent)")
    # transformers drops, without a word, a tensor that its class of model does not have.
    used = len(set(tensor_names) - {"rope_freqs.weight"})
    if len(state) != used:
        raise ValueError(f"{path}: {used} tensors, but a {config['model_type']} has {len(state)}")
    if tie and not config["tie_word_embeddings"]:
        state["model.embed_tokens.weight"] = state.pop("lm_head.weight")
        config["tie_word_embeddings"] = True
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_json(folder / "config.json", config)
    return config


def _hf_config(
    model: Any, metadata: Mapping[str, Any], rope: Mapping[str, Any] | None
) -> dict[str, Any]:
    config = {k: v for k, v in model.config.to_diff_dict().items() if k not in _NOT_CONFIG}
    epsilon = metadata[f"{metadata['general.architecture']}.attention.layer_norm_rms_epsilon"]
    config |= {
        "architectures": [type(model).__name__],
        "dtype": "bfloat16",
        # A float32 in the file; its shortest decimal is what the original config.json says.
        "rms_norm_eps": float(str(np.float32(epsilon))),
        "tie_word_embeddings": bool(model.config.tie_word_embeddings),
    }
    if rope is not None:
        config["rope_parameters"] = dict(rope)
    return config


def _write_generation_config(
    folder: Path, config: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    """Write bos, eos and pad; a file may name an end of turn besides the end of text."""
    values = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    turn_end = metadata.get("tokenizer.ggml.eot_token_id")
    if turn_end is not None and turn_end != values["eos_token_id"]:
        values["eos_token_id"] = [values["eos_token_id"], turn_end]
    present = {name: value for name, value in values.items() if value is not None}
    write_json(folder / "generation_config.json", present)


def _write_tokenizer(path: Path, folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write the tokenizer and its chat template, with the digit splitting of SmolLM restored."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        # transformers does not know this name and splits by the GPT-2 pattern alone;
        # llama.cpp, like the original tokenizer, first splits off every digit.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    for name in ("is_local", "local_files_only", "name_or_path"):
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
