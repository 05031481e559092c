"""JSON lines on disk and one line a step on the console."""

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TIMING_PREFIX = "time/"  # wall-clock fields: the only ones that a resumed run may change


def write_atomically(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it, so that it is never half-written.

    A link is followed, and a file that is replaced leaves its mode.
    """
    path = Path(os.path.realpath(path))
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line; NaN and infinities become null, which JSON has."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({k: _plain(v) for k, v in record.items()}, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read whole lines; a last line cut short by a crash is left out.

    Raises ValueError for a line that no crash can leave.
    """
    if not path.exists():
        return []
    records = []
    # Only "\n" ends a line: str.splitlines also splits at characters that a sample may hold.
    lines = path.read_bytes().rstrip(b"\n").split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: is not valid JSON") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: holds no record")
        records.append(record)
    return records


def keep_steps(path: Path, last_step: int) -> None:
    """Drop records of later steps than `last_step`, which a resumed run will write again.

    Raises ValueError for a record without a step.
    """
    records = read_jsonl(path)
    for number, record in enumerate(records, start=1):
        if type(record.get("step")) is not int:
            raise ValueError(f"{path}:{number}: holds no step")
    records = [record for record in records if record["step"] <= last_step]
    if path.exists():
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_atomically(path, "".join(lines))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def console_line(record: Mapping[str, Any], *, total_steps: int, eta_seconds: float | None) -> str:
    """Format the numbers of a step that one wants to see go by; eta_seconds None: not known."""
    step = record["step"]
    count = f"{step:>{len(str(total_steps))}}/{total_steps}"
    parts = [f"step {count} {progress_bar(step, total_steps)}", f"reward {record['reward']:.3f}"]
    # Groups whose rewards differ: the others have no gradient.
    parts.append(f"kept {record['kept_groups']}/{record['groups']}")
    for name, label, form in (
        ("entropy", "entropy", ".3f"),
        ("kl", "kl", ".4f"),
        ("length_mean", "length", ".1f"),
        ("grad_norm", "grad", ".3f"),
        ("sigma", "sigma", ".1e"),
        ("time/tokens_per_second", "tok/s", ".0f"),
        ("time/step", "s/step", ".2f"),
    ):
        if record.get(name) is not None:
            parts.append(f"{label} {record[name]:{form}}")
    eta = "-:--" if eta_seconds is None else format_seconds(eta_seconds)
    return "  ".join([*parts, f"eta {eta}"])


def sample_text(prompt: str, completion: str, reward: float) -> str:
    """Format a sample to be read: on one line if it is short, else line by line.

    Long texts lose their middle, and what a terminal might obey is shown as U+FFFD.
    """
    prompt, completion = _shown(prompt), _shown(completion)
    if len(prompt) + len(completion) <= 80 and "\n" not in prompt + completion:
        return f"  sample | {prompt} -> {completion} | reward {reward:g}"
    lines = [f"  sample | reward {reward:g}"]
    lines += [f"  prompt | {line}" for line in prompt.split("\n")]
    lines += [f"       ->| {line}" for line in completion.split("\n")]
    return "\n".join(lines)


def _shown(text: str, *, limit: int = 1200) -> str:
    if len(text) > limit:
        text = f"{text[: limit // 2]} [...] {text[-limit // 2 :]}"
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def progress_bar(done: int, total: int, *, width: int = 10) -> str:
    """Draw a bar such as [####......]; it is full only when all is done."""
    filled = width * done // total
    return f"[{'#' * filled}{'.' * (width - filled)}]"


def remaining_seconds(step_ends: Sequence[float], *, steps_left: int) -> float | None:
    """Estimate the time of the steps to come from the ends of those done (seconds of a clock).

    The first step, which compiles, only starts the clock; None until a second one has ended.
    """
    if len(step_ends) < 2:
        return None
    return (step_ends[-1] - step_ends[0]) / (len(step_ends) - 1) * steps_left


def format_seconds(seconds: float) -> str:
    """Format a duration as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def read_rows(source: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a JSONL file or of standard input ("-").

    Raises ValueError naming the line that is not a JSON object.
    """
    if source is None:
        return
    name = "standard input" if source == "-" else source
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: is not UTF-8 text (byte {error.start})") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}:{number}: not valid JSON ({error.msg})") from error
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise ValueError(f"{name}:{number}: is not valid Unicode") from error
        except (RecursionError, ValueError) as error:  # a number of thousands of digits
            raise ValueError(f"{name}:{number}: not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{name}:{number}: holds {type(row).__name__}, not an object")
        yield f"{name}:{number}", row


def is_stream(target: str) -> bool:
    """Tell a device, a pipe or an open file of the process from a file that can be replaced."""
    path = Path(target)
    opened = target.startswith(("/dev/std", "/dev/fd/", "/proc/"))
    return opened or (path.exists() and not path.is_file())


def write_lines(target: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records as JSONL to a file, whole or not at all, or to standard output ("-")."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    if target == "-":
        sys.stdout.write(text)
    elif is_stream(target):
        Path(target).write_text(text, encoding="utf-8")
    else:
        write_atomically(Path(target), text)
