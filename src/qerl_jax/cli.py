"""The command line: check the input and hand plain values to `qerl_jax.commands`.

Nothing heavy is imported before a command runs, so --help and --print-config answer at once.
"""

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from qerl_jax import __version__
from qerl_jax.cli_commands import COMMANDS
from qerl_jax.cli_parse import overview, parse_command
from qerl_jax.config import ExperimentConfig
from qerl_jax.config_decode import is_text, nearest
from qerl_jax.config_io import dump_config, load_config
from qerl_jax.config_rules import validate_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 2 for a refusal, 130 if interrupted.

    Expected errors end as one line on standard error; with --debug they keep their traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    _write_utf8()
    try:
        code = _run([a for a in arguments if a != "--debug"])
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader left (`qerl score ... | head`); the flush at exit must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, KeyboardInterrupt) as error:
        if debug:
            raise
        print(f"qerl: error: {_one_line(error)}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 2


def run() -> NoReturn:
    """Run the command line of this process, and end it."""
    code = main()
    if code:
        sys.stdout.flush()
        # Not sys.exit: threads of JAX and orbax, stopped in the middle, would print tracebacks or
        # crash while the interpreter takes itself apart.
        os._exit(code)
    sys.exit(code)


def _write_utf8() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what it is in a test or a notebook stays
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _run(arguments: list[str]) -> int:
    for text in arguments:
        if not is_text(text):
            raise ValueError(f"{text!r} is not valid text")
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(overview(COMMANDS))
        return 0
    if name == "--version":
        print(f"qerl {__version__}")
        return 0
    if name not in COMMANDS:
        near = nearest(name, tuple(COMMANDS))
        hint = f"nearest: {near[0]}" if name and near else f"commands: {', '.join(COMMANDS)}"
        problem = f'unknown command "{name}"' if name else "a command is missing"
        raise ValueError(f"{problem} ({hint}); see qerl --help")
    return _RUNNERS[name](parse_command(name, COMMANDS[name], arguments[1:])) or 0


def _one_line(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    whole = r"\n".join(lines)  # a value may hold a line break
    return whole if len(whole) <= 300 else f"{lines[0]} (more with --debug)"


def _load(command: str, path: str | None, overrides: list[str]) -> ExperimentConfig:
    if path is None:
        example = f"qerl {command} configs/quickstart.yaml"
        raise ValueError(f"{command}: a config file is missing, as in {example}")
    config = load_config(path, overrides)
    validate_config(config)
    return config


def _train(flags: dict[str, Any]) -> int | None:
    if flags["resume"] and flags["overwrite"]:
        raise ValueError("train: --resume and --overwrite exclude each other")
    config = _load("train", flags.pop("config"), flags.pop("overrides"))
    if flags.pop("print_config"):
        print(dump_config(config), end="")
        return 0
    from qerl_jax import commands

    return commands.train(config, **flags)


def _evaluate(flags: dict[str, Any]) -> int | None:
    config_file = flags.pop("config")
    config = _load("eval", config_file, flags.pop("overrides"))
    from qerl_jax import commands

    return commands.evaluate(config, config_file=config_file, **flags)


def _generate(flags: dict[str, Any]) -> int | None:
    prompts = tuple(flags.pop("prompts") or ())
    if not prompts and flags["input"] is None:
        raise ValueError("generate: no prompts; give --prompt or --in; see qerl generate --help")
    from qerl_jax import commands

    return commands.generate(prompts=prompts, **flags)


def _call(name: str) -> Callable[[dict[str, Any]], int | None]:
    """Return a runner that hands every flag to the function of that name in `commands`."""

    def run(flags: dict[str, Any]) -> int | None:
        from qerl_jax import commands

        return getattr(commands, name)(**flags)

    return run


_RUNNERS = {  # they take the parsed flags and return an exit code, or None for 0
    "train": _train,
    "eval": _evaluate,
    "score": _call("score"),
    "generate": _generate,
    "quantize": _call("quantize"),
    "convert": _call("convert"),
    "export-adapter": _call("export_adapter"),
}
