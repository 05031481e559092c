"""README.md stays true: its commands parse, its code runs, its links lead somewhere.

Every line of a ```bash block is checked against the command line; those of ```bash run are run.
"""

import dataclasses
import functools
import re
import shlex
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(?P<tag>[a-z ]+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
TAKES_CONFIG = ("eval", "train")


def _blocks(tag: str) -> list[str]:
    return [match["body"] for match in BLOCK.finditer(README) if match["tag"] == tag]


def _commands(tag: str) -> list[str]:
    lines = "".join(_blocks(tag)).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


RUN = _commands("bash run")
COMMANDS = [*_commands("bash"), *RUN]
QERL = [command for command in COMMANDS if command.startswith("qerl ")]
TABLE = re.findall(r"^\| `qerl ([a-z-]+)", README, re.MULTILINE)


def _qerl(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "qerl_jax", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"qerl {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@functools.cache
def _flags(subcommand: str) -> frozenset[str]:
    return frozenset(re.findall(r"--[a-zA-Z][\w.-]*", _qerl(subcommand, "--help")))


def _is_config_field(dotted: str) -> bool:
    from qerl_jax.config import ExperimentConfig

    cls = ExperimentConfig
    for name in dotted.split("."):
        if not dataclasses.is_dataclass(cls):
            return typing.get_origin(cls) is dict  # data.task.*, loss.extra.*
        types = {field.name: field.type for field in dataclasses.fields(cls)}
        if name not in types:
            return False
        cls = types[name]
    return not dataclasses.is_dataclass(cls)


def test_readme_is_short_and_has_commands():
    assert len(README.splitlines()) < 200
    assert QERL and RUN and TABLE and _blocks("python")


@pytest.mark.parametrize("command", COMMANDS)
def test_programs_are_known(command):
    program, *arguments = shlex.split(command)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets)
    else:
        assert program in {"qerl", "source"}


@pytest.mark.parametrize("command", QERL)
def test_arguments_are_known(command):
    _, subcommand, *arguments = shlex.split(command)
    for argument in arguments:
        if argument.startswith("--"):
            is_field = subcommand in TAKES_CONFIG and _is_config_field(argument[2:])
            assert is_field or argument in _flags(subcommand), argument
        elif argument.endswith(".yaml"):
            assert (ROOT / argument).is_file(), argument


@pytest.mark.parametrize("subcommand", TABLE)
def test_commands_of_the_table_exist(subcommand):
    assert "qerl " + subcommand in _qerl(subcommand, "--help")


@pytest.mark.parametrize("command", RUN)
def test_commands_run(command, tmp_path):
    # A run folder of its own: the one in the config may be left from an earlier quickstart.
    assert _qerl(*shlex.split(command)[1:], "--run_dir", str(tmp_path / "run"))


def test_the_loss_of_the_readme_computes():
    (source,) = [block for block in _blocks("python") if block.startswith("# my_losses.py")]
    names: dict = {}
    exec(source, names)
    ratio = jnp.array([[0.5, 1.0, 2.0]] * 2)
    mask = jnp.ones((2, 3))
    loss, statistics = names["my_loss"](
        jnp.log(ratio), jnp.zeros((2, 3)), None, jnp.array([1.0, -1.0]), mask, epsilon_low=0.2
    )
    # A good action is never clipped; a bad one no longer improves below ratio 0.8.
    np.testing.assert_allclose(loss, [[-0.5, -1.0, -2.0], [0.8, 1.0, 2.0]], rtol=1e-6)
    np.testing.assert_array_equal(statistics["clipped_low"], [[0, 0, 0], [1, 0, 0]])


def test_the_reward_of_the_readme_computes():
    (source,) = [block for block in _blocks("python") if block.startswith("# my_rewards.py")]
    names: dict = {}
    exec(source, names)
    assert names["short_and_right"]("1+1=", "2", "2") == pytest.approx(0.999)
    assert names["short_and_right"]("1+1=", "3", "2") == pytest.approx(-0.001)


def test_named_extras_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"'\.\[([a-z]+)\]'", README)
    assert named and set(named) <= set(project["optional-dependencies"])


def test_links_lead_somewhere():
    missing = [link for link in LINK.findall(README) if not (ROOT / link).exists()]
    assert not missing, "\n".join(missing)
