"""The command line: golden refusals, what reaches `commands`, exit codes, and quick answers."""

import inspect
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import qerl_jax
from qerl_jax.cli import main
from qerl_jax.cli_commands import COMMANDS
from qerl_jax.cli_parse import parse_command
from qerl_jax.config import ExperimentConfig
from qerl_jax.config_io import parse_config

FUNCTIONS = ("train", "evaluate", "score", "generate", "quantize", "convert", "export_adapter")
NOT_PASSED = {"train": {"config", "overrides", "print_config"}, "eval": {"config", "overrides"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of the test, which holds x.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text("rollout: {top_k: 3}\n")
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    """Replace `qerl_jax.commands` and return the list of the calls it receives."""
    received: list = []

    def recorder(name: str):
        return lambda *args, **flags: received.append((name, args, flags))

    fake = SimpleNamespace(**{name: recorder(name) for name in FUNCTIONS})
    monkeypatch.setitem(sys.modules, "qerl_jax.commands", fake)
    monkeypatch.setattr(qerl_jax, "commands", fake, raising=False)
    return received


REFUSED = {
    "": "a command is missing (commands: train, eval, score, generate, quantize, convert, "
    "export-adapter); see qerl --help",
    "tarin x.yaml": 'unknown command "tarin" (nearest: train); see qerl --help',
    "--verbose": 'unknown command "--verbose" (commands: train, eval, score, generate, quantize, '
    "convert, export-adapter); see qerl --help",
    "train": "train: a config file is missing, as in qerl train configs/quickstart.yaml",
    "eval --limit 3": "eval: a config file is missing, as in qerl eval configs/quickstart.yaml",
    "train nope.yaml": "nope.yaml: no such config file",
    "train x.yaml y.yaml": 'train: unexpected argument "y.yaml"; see qerl train --help',
    "train x.yaml --rezume": "train: unknown flag --rezume (nearest: --resume); see qerl train "
    "--help",
    "train x.yaml --over": "train: unknown flag --over (nearest: --overwrite); see qerl train "
    "--help",
    "train x.yaml --learning_rate 1": "train: unknown flag --learning_rate (nearest: "
    "--optimizer.learning_rate); see qerl train --help",
    "train x.yaml --loss grpo": "--loss is a section; set one of its fields, as in --loss.name",
    "train x.yaml --rollout.topk 1": "--rollout.topk is unknown (nearest: --rollout.top_k)",
    "train x.yaml --rollout.top_k": "--rollout.top_k: needs a value, as in --rollout.top_k VALUE "
    "or --rollout.top_k=VALUE",
    "train x.yaml --rollout.top_k x": '--rollout.top_k: expected int, got "x"',
    "train x.yaml --rollout.top_p 2": "rollout.top_p: expected a number in [0.000001, 1], got 2.0",
    "train x.yaml --resume --overwrite": "train: --resume and --overwrite exclude each other",
    "eval x.yaml --limit 0": "eval: argument --limit: expected >= 1, got 0; see qerl eval --help",
    "score --in -": "score: the following arguments are required: --model; see qerl score --help",
    "score --modle a --in -": "score: unknown flag --modle (nearest: --model); see qerl score "
    "--help",
    "score --model a --in - --top-k x": 'score: argument --top-k: expected int, got "x"; see '
    "qerl score --help",
    "score --model a --in - --temperature 0": "score: argument --temperature: expected >= 0.001, "
    "got 0.0; see qerl score --help",
    "score --model": "score: argument --model: expected one argument (one that begins "
    "with - is written --flag=VALUE); see qerl score --help",
    "score --model= --in -": "score: model is empty; see qerl score --help",
    "score --model a\0 --in -": r"'a\x00' is not valid text",
    "score --model a --in - --seed 1": "score: unknown flag --seed; see qerl score --help",
    "generate --model a": "generate: no prompts; give --prompt or --in; see qerl generate --help",
    "generate --model a --prompt b --min-p 1": "generate: argument --min-p: expected a number in "
    "[0, 1), got 1.0; see qerl generate --help",
    "generate --model a --prompt b --temperature nan": "generate: argument --temperature: "
    "expected a finite number, got nan; see qerl generate --help",
    "convert a.gguf": "convert: the following arguments are required: OUT_DIR; see qerl convert "
    "--help",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_command_line_is_refused_in_one_line(folder, calls, capsys, line):
    assert main(shlex.split(line)) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"qerl: error: {REFUSED[line]}\n")
    assert calls == []


def test_debug_keeps_the_traceback(folder):
    with pytest.raises(FileNotFoundError, match="no such config file"):
        main(["train", "nope.yaml", "--debug"])


def test_train_receives_the_config_and_its_flags(folder, calls):
    arguments = "train --loss.beta 0.1 x.yaml --seed=7 --resume -q --optimizer.b1 0"
    assert main(shlex.split(arguments)) == 0
    ((name, (config,), flags),) = calls
    assert name == "train"
    assert isinstance(config, ExperimentConfig)
    assert (config.loss.beta, config.seed, config.optimizer.b1) == (0.1, 7, 0.0)
    assert config.rollout.top_k == 3
    assert flags == {
        "resume": True,
        "overwrite": False,
        "dry_run": False,
        "stop_after": None,
        "quiet": True,
    }


def test_eval_receives_the_config_and_its_flags(folder, calls):
    arguments = "eval x.yaml --adapter a --limit 5 --out o.jsonl --eval.temperature 1"
    assert main(shlex.split(arguments)) == 0
    ((name, (config,), flags),) = calls
    assert (name, config.eval.temperature) == ("evaluate", 1.0)
    expected = {"adapter": "a", "split": "eval", "limit": 5, "out": "o.jsonl"}
    assert flags == {**expected, "config_file": "x.yaml"}


PASSED = {
    "score --model m --in -": (
        "score",
        {
            "model": "m",
            "adapter": None,
            "quantize": False,
            "dtype": "float32",
            "input": "-",
            "output": "-",
            "top_k": 0,
            "temperature": 1.0,
        },
    ),
    "generate --model m --prompt a 'b c' --prompt=--d -n 2 --chat --top-p 0.5": (
        "generate",
        {
            "model": "m",
            "adapter": None,
            "quantize": False,
            "dtype": "float32",
            "prompts": ("a", "b c", "--d"),
            "input": None,
            "chat": True,
            "n": 2,
            "max_tokens": 64,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 0.5,
            "min_p": 0.0,
            "seed": 0,
        },
    ),
    "quantize --model m --out o --scale-rounding bfloat16": (
        "quantize",
        {"model": "m", "out": "o", "scale_rounding": "bfloat16"},
    ),
    "convert a.gguf o --tie": ("convert", {"gguf": "a.gguf", "out": "o", "tie": True}),
    "export-adapter r o --step 3": ("export_adapter", {"run_dir": "r", "out": "o", "step": 3}),
}


@pytest.mark.parametrize("line", PASSED)
def test_flags_reach_their_function(calls, line):
    assert main(shlex.split(line)) == 0
    name, flags = PASSED[line]
    assert calls == [(name, (), flags)]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("lora.rank: 600 exceeds 576"), 2, "lora.rank: 600 exceeds 576"),
        (ValueError("first\n\nsecond"), 2, r"first\nsecond"),
        (ValueError("first\n" + "x" * 300), 2, "first (more with --debug)"),
        (ValueError(), 2, "ValueError"),
        (FileExistsError("runs/a: exists"), 2, "runs/a: exists"),
        (PermissionError(13, "Permission denied", "runs/a"), 2, "runs/a: Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_expected_errors_end_in_one_line(calls, monkeypatch, capsys, error, code, line):
    def fail(**flags):
        raise error

    monkeypatch.setattr(sys.modules["qerl_jax.commands"], "convert", fail)
    assert main(["convert", "a", "b"]) == code
    assert capsys.readouterr().err == f"qerl: error: {line}\n"


def test_other_errors_are_bugs_and_keep_their_traceback(calls, monkeypatch):
    def fail(**flags):
        raise TypeError("a bug")

    monkeypatch.setattr(sys.modules["qerl_jax.commands"], "convert", fail)
    with pytest.raises(TypeError, match="a bug"):
        main(["convert", "a", "b"])


def test_exit_code_of_a_command_is_kept(calls, monkeypatch):
    monkeypatch.setattr(sys.modules["qerl_jax.commands"], "convert", lambda **flags: 3)
    assert main(["convert", "a", "b"]) == 3


def _example_flags(name: str) -> dict:
    words = shlex.split(COMMANDS[name].example)
    return parse_command(name, COMMANDS[name], words[words.index("qerl") + 2 :])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_what_it_does_and_an_example_that_parses(capsys, name):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert COMMANDS[name].summary in text
    assert f"example:\n  {COMMANDS[name].example}\n" in text
    assert f" {name} " in COMMANDS[name].example
    _example_flags(name)


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_fit_the_function_that_takes_them(name):
    from qerl_jax import commands

    function = getattr(commands, {"eval": "evaluate"}.get(name, name.replace("-", "_")))
    flags = {k: v for k, v in _example_flags(name).items() if k not in NOT_PASSED.get(name, ())}
    positional = (ExperimentConfig(),) if name in NOT_PASSED else ()
    inspect.signature(function).bind(*positional, **flags)


def test_overview_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in text
        assert command.summary in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_print_config_is_the_whole_config(folder, calls, capsys):
    assert main(["train", "x.yaml", "--print-config", "--seed", "5"]) == 0
    config = parse_config(capsys.readouterr().out)
    assert (config.seed, config.rollout.top_k) == (5, 3)
    assert calls == []


@pytest.mark.parametrize(
    "line", ["--help", "train --help", "--version", "train x.yaml --print-config", "train no.yaml"]
)
def test_quick_answers_import_nothing_heavy(folder, line):
    script = (
        "import sys\n"
        "from qerl_jax.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'transformers', 'datasets', 'flax'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *line.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr


def _python_m(*arguments: str, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONUNBUFFERED", None)
    command = [sys.executable, "-m", "qerl_jax", *arguments]
    return subprocess.run(command, text=True, env=environment, **options)


def test_module_is_the_command():
    done = _python_m("--version", capture_output=True)
    assert (done.returncode, done.stdout) == (0, f"qerl {qerl_jax.__version__}\n")
    done = _python_m("convert", capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith("qerl: error: convert: the following arguments are required")


def test_a_reader_that_leaves_is_not_an_error(folder):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = _python_m("train", "x.yaml", "--print-config", stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")
