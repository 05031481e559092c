"""Settings and fixtures of all tests. Nothing of ours is imported before the hook below."""

import atexit
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# Tests start other processes on the same GPU; none of them may reserve the whole of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# No test may wait for a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A program that another test or a child process has compiled is not compiled again.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="qerl-jax-cache-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax

PACKAGES = ("qerl_jax", "kernels_pallas")

# beartype may be missing on a GPU machine; shapes are then left unchecked.
if importlib.util.find_spec("beartype") is not None:
    from jaxtyping import install_import_hook

    install_import_hook(PACKAGES, "beartype.beartype")

jax.config.update("jax_numpy_rank_promotion", "raise")

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # The same examples on every run, no database on disk, no time limits (compilation is slow).
    settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
    settings.load_profile("repeatable")


@pytest.fixture
def key() -> jax.Array:
    """Return a typed random key, the same in every test."""
    return jax.random.key(0)


@pytest.fixture(scope="session")
def golden() -> Path:
    """Return the folder of the reference vectors; its README says who made them."""
    return Path(__file__).parent / "golden"


TINY_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TINY_RUN = """\
run_dir: {home}/run
model: {{path: {home}/model, compute_dtype: float32, remat: false}}
lora: {{rank: 4, alpha: 8}}
data: {{source: arithmetic, name: addition, train_size: 6, eval_size: 4}}
rollout: {{prompts_per_step: 2, num_generations: 4, max_completion_tokens: 4}}
reward: {{functions: ["tiny_rewards:sevens"]}}
optimizer: {{learning_rate: 1.0e-2, warmup_steps: 2}}
train: {{total_steps: 4, checkpoint_every: 2, log_samples_every: 2}}
eval: {{batch_size: 4}}
"""


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all that a training run of a second needs.

    model/ is a random Qwen2 with a token for each character of an addition, config.yaml trains it
    in 4 steps, and tiny_rewards.py, on the path of this process, rewards it for writing sevens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    from qerl_jax.models import decoder_config_from_hf
    from qerl_jax.models.hf_save import save_dense
    from qerl_jax.testing import tiny_params

    home = tmp_path_factory.mktemp("tiny")
    config = decoder_config_from_hf(TINY_MODEL)
    params = tiny_params(jax.random.key(0), config, quantize=False)
    save_dense(home / "model", params, config, hf_config=TINY_MODEL, dtype="float32")
    tokens = ["<pad>", "<eos>", *"0123456789+-*="]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(tokens[:2])
    tokenizer.save(str(home / "model/tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    kind["eos_token"] = "<eos>"
    (home / "model/tokenizer_config.json").write_text(json.dumps(kind))
    (home / "tiny_rewards.py").write_text(
        "def sevens(prompt, completion, answer):\n    return completion.count('7') / 4\n"
    )
    (home / "config.yaml").write_text(TINY_RUN.format(home=home))
    sys.path.append(str(home))
    return home


@pytest.fixture
def checkpoint_dir(request: pytest.FixtureRequest) -> Path:
    """Return the folder named by the variable of `@pytest.mark.checkpoint("VARIABLE")`."""
    return Path(os.environ[request.node.get_closest_marker("checkpoint").args[0]])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run."""
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    # Asked for only if some test wants one: the question starts the backend.
    if needs_gpu and jax.default_backend() != "gpu":
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    for item in items:
        for marker in item.iter_markers("checkpoint"):
            (variable,) = marker.args
            if not os.environ.get(variable):
                reason = f"{variable} names no checkpoint folder"
                item.add_marker(pytest.mark.skip(reason=reason))
