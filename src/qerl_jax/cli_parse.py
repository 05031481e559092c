"""Parsing of command lines: flags by argparse, config overrides apart, errors of one line."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn

from qerl_jax.config import ExperimentConfig
from qerl_jax.config_decode import field_names, nearest
from qerl_jax.config_rules import interval_problem

Argument = tuple[tuple[str, ...], dict[str, Any]]  # what ArgumentParser.add_argument takes


class Command(NamedTuple):
    """A subcommand, as its help shows it."""

    summary: str
    example: str
    arguments: tuple[Argument, ...]
    overrides: bool = False  # takes --section.field value, passed on as the flag `overrides`


def argument(*flags: str, **options: Any) -> Argument:
    """Describe one argument in the words of ArgumentParser.add_argument."""
    return flags, options


def number(kind: type, interval: str) -> Callable[[str], Any]:
    """Return a reader of int or float text that refuses numbers outside "[0, 1)" and the like."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            message = f'expected {kind.__name__}, got "{text}"'
            raise argparse.ArgumentTypeError(message) from None
        problem = interval_problem(value, interval)
        if problem:
            raise argparse.ArgumentTypeError(problem)
        return value

    return read


def parse_command(name: str, command: Command, arguments: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments that follow the name of a command; --help prints and exits.

    Raises ValueError for unknown flags (with the nearest one), missing and malformed values.
    """
    overrides, rest = _split_overrides(arguments) if command.overrides else ([], list(arguments))
    _refuse_unknown_flags(name, command, rest)
    parsed, unexpected = _build_parser(name, command).parse_known_args(rest)
    if unexpected:
        raise ValueError(f'{name}: unexpected argument "{unexpected[0]}"; see qerl {name} --help')
    for flag, value in vars(parsed).items():
        if value == "":
            raise ValueError(f"{name}: {flag} is empty; see qerl {name} --help")
    return {**vars(parsed), **({"overrides": overrides} if command.overrides else {})}


def overview(commands: dict[str, Command]) -> str:
    """Return the text of `qerl --help`."""
    width = max(map(len, commands)) + 2
    lines = [
        "usage: qerl COMMAND ...",
        "",
        "Reinforcement learning of NVFP4-quantized language models through LoRA.",
        "",
        *(f"  {name:{width}}{command.summary}" for name, command in commands.items()),
        "",
        "qerl COMMAND --help shows its flags and an example; qerl --version prints the version.",
        "--debug keeps the traceback of an error.",
        "",
        "example:",
        f"  {commands['train'].example}",
    ]
    return "\n".join(lines)


def _build_parser(name: str, command: Command) -> argparse.ArgumentParser:
    epilog = f"example:\n  {command.example}\n\n"
    if command.overrides:
        epilog += "Any field of the config: --section.field VALUE or --section.field=VALUE.\n"
    parser = argparse.ArgumentParser(
        prog=f"qerl {name}",
        description=command.summary,
        epilog=f"{epilog}--debug keeps the traceback of an error.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flags, options in command.arguments:
        parser.add_argument(*flags, **options)

    def refuse(message: str) -> NoReturn:
        if message.endswith("expected one argument") or message.endswith("at least one argument"):
            message += " (one that begins with - is written --flag=VALUE)"
        raise ValueError(f"{name}: {message}; see qerl {name} --help")

    parser.error = refuse  # argparse would print its usage and exit
    return parser


def _split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part config overrides from the rest, as argparse takes their values for positionals."""
    top_level = [f"--{f.name}" for f in fields(ExperimentConfig)]
    overrides: list[str] = []
    rest: list[str] = []
    tokens = list(arguments)
    while tokens:
        token = tokens.pop(0)
        flag, equals, _ = token.partition("=")
        if not (flag in top_level or (flag.startswith("--") and "." in flag)):
            rest.append(token)
            continue
        overrides.append(token)
        if not equals and tokens and not tokens[0].startswith("--"):
            overrides.append(tokens.pop(0))
    return overrides, rest


def _refuse_unknown_flags(name: str, command: Command, arguments: Sequence[str]) -> None:
    flags = [flag for names, _ in command.arguments for flag in names if flag.startswith("--")]
    known = ["help", *(flag[2:] for flag in flags)]
    for token in arguments:
        flag = token.partition("=")[0]
        if flag == "--":
            return
        if flag.startswith("--") and flag[2:] not in known:
            near = nearest(flag[2:], [*known, *(field_names() if command.overrides else ())])
            hint = f" (nearest: {' or '.join(f'--{n}' for n in near)})" if near else ""
            raise ValueError(f"{name}: unknown flag {flag}{hint}; see qerl {name} --help")
