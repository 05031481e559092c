"""Settings and fixtures of all tests. Nothing of ours is imported before the hook below."""

import importlib.util
import os
from pathlib import Path

import pytest

# Tests start other processes on the same GPU; none of them may reserve the whole of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# No test may wait for a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

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
