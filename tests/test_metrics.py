"""JSON lines on disk and the console line: what a crash leaves, what a resumed run keeps."""

import io
import json
import math
import os
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.metrics import (
    append_jsonl,
    console_line,
    format_seconds,
    is_stream,
    keep_steps,
    progress_bar,
    read_jsonl,
    read_rows,
    remaining_seconds,
    sample_text,
    write_atomically,
    write_lines,
)

RECORD = {
    "step": 3,
    "reward": 0.25,
    "kept_groups": 2,
    "groups": 8,
    "entropy": 1.23456,
    "length_mean": 4.5,
    "grad_norm": 0.125,
    "sigma": 1e-3,
    "time/tokens_per_second": 1234.4,
    "time/step": 1.5,
}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    write_atomically(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half\ud800")
    assert path.read_text() == "old\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_records_are_plain_json(tmp_path):
    path = tmp_path / "m.jsonl"
    append_jsonl(path, {"step": 1, "a": jnp.float32(0.1), "b": np.int64(2), "text": "é"})
    append_jsonl(path, {"step": 2, "a": math.nan, "b": np.float32(math.inf), "c": {"d": math.nan}})
    first, second = path.read_text(encoding="utf-8").splitlines()
    assert first == '{"step": 1, "a": 0.10000000149011612, "b": 2, "text": "é"}'
    assert json.loads(second) == {"step": 2, "a": None, "b": None, "c": {"d": None}}


@pytest.mark.parametrize("cut", [b'{"ste', b'{"step": 3, "text": "\xc3', b""])
def test_a_line_cut_by_a_crash_is_left_out(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    assert read_jsonl(path) == []
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + cut)
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": "1"}'])
def test_what_is_no_record_is_refused(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"^{path}:2: holds no (record|step)$"):
        keep_steps(path, 5)


def test_only_a_newline_ends_a_record(tmp_path):
    """str.splitlines takes more characters for line ends, and models write them."""
    record = {"step": 1, "text": "a\u2028b\u0085c\x1cd\n"}
    path = tmp_path / "m.jsonl"
    append_jsonl(path, record)
    append_jsonl(path, record | {"step": 2})
    keep_steps(path, 1)
    assert read_jsonl(path) == [record]
    assert list(read_rows(str(path))) == [(f"{path}:1", record)]


def test_records_of_later_steps_go_and_the_others_keep_their_bytes(tmp_path):
    path = tmp_path / "m.jsonl"
    for step in range(1, 5):
        append_jsonl(path, {"step": step, "a": np.float32(step) / 3, "b": 1e-8, "c": math.nan})
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + '{"step": 5, "a"')
    keep_steps(path, 2)
    assert path.read_text() == "".join(lines[:2])
    keep_steps(tmp_path / "absent.jsonl", 2)
    assert not (tmp_path / "absent.jsonl").exists()


def test_console_line():
    assert console_line(RECORD, total_steps=12, eta_seconds=65.4) == (
        "step  3/12 [##........]  reward 0.250  kept 2/8  entropy 1.235  length 4.5  "
        "grad 0.125  sigma 1.0e-03  tok/s 1234  s/step 1.50  eta 1:05"
    )


def test_console_line_shows_kl_when_there_is_one_and_no_eta_before_it_is_known():
    line = console_line(RECORD | {"kl": 0.01}, total_steps=3, eta_seconds=None)
    assert line.startswith(
        "step 3/3 [##########]  reward 0.250  kept 2/8  entropy 1.235  kl 0.0100  "
    )
    assert line.endswith("  eta -:--")


@pytest.mark.parametrize(
    ("done", "bar"),
    [(0, ".........."), (9, "#########."), (10, "##########")],
)
def test_progress_bar(done, bar):
    assert progress_bar(done, 10) == f"[{bar}]"


def test_a_bar_is_full_only_at_the_end():
    assert progress_bar(999_999, 1_000_000) == "[#########.]"
    assert progress_bar(1, 3, width=3) == "[#..]"


def test_the_first_step_does_not_count_in_the_eta():
    # It ends at 100 s after compiling, those after it take 2 s each.
    assert remaining_seconds([], steps_left=10) is None
    assert remaining_seconds([100.0], steps_left=9) is None
    assert remaining_seconds([100.0, 102.0], steps_left=8) == 16.0
    assert remaining_seconds([100.0, 102.0, 104.0], steps_left=7) == 14.0
    assert remaining_seconds([100.0, 102.0], steps_left=0) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599.0, "59:59"), (3723.0, "1:02:03")]
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_rows_come_with_their_place(tmp_path, monkeypatch):
    path = tmp_path / "in.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert list(read_rows(str(path))) == [(f"{path}:1", {"a": 1}), (f"{path}:3", {"a": 2})]
    assert list(read_rows(None)) == []
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'\xef\xbb\xbf{"a": 3}\n')))
    assert list(read_rows("-")) == [("standard input:1", {"a": 3})]


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "2: not valid JSON (Expecting property name"), ("[1]", "2: holds list, not an object")],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, line, message):
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(ValueError) as refusal:
        list(read_rows(str(path)))
    assert str(refusal.value).startswith(f"{path}:{message}")


def test_what_is_written_follows_a_link_and_keeps_the_mode(tmp_path):
    (tmp_path / "private").write_text("old")
    (tmp_path / "private").chmod(0o600)
    (tmp_path / "link").symlink_to("private")
    write_lines(str(tmp_path / "link"), [{"a": 1}])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "private").read_text() == '{"a": 1}\n'
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_lines(str(pipe), [{"a": 1}])
    assert os.read(reader, 100) == b'{"a": 1}\n'
    os.close(reader)
    assert pipe.is_fifo()
    for name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
        assert is_stream(name)


@pytest.mark.parametrize("line", ["{", "[" * 100_000, "1" * 5000])
def test_only_the_last_line_may_be_cut_short(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line)
    assert read_jsonl(path) == [{"step": 1}]
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: is not valid JSON$"):
        keep_steps(path, 3)
    assert path.read_text().endswith('{"step": 3}\n')


def test_lines_are_written_to_a_file_or_to_standard_output(tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    write_lines(str(path), [{"a": "é"}, {"a": 2}])
    write_lines("-", [{"a": "é"}, {"a": 2}])
    assert path.read_text(encoding="utf-8") == capsys.readouterr().out == '{"a": "é"}\n{"a": 2}\n'


def test_a_short_sample_is_one_line():
    assert sample_text("17+58=", "75", 1.0) == "  sample | 17+58= -> 75 | reward 1"


def test_a_long_sample_is_read_line_by_line():
    assert sample_text("Add.\n17+58", "75\n\n#### 75", 0.5).split("\n") == [
        "  sample | reward 0.5",
        "  prompt | Add.",
        "  prompt | 17+58",
        "       ->| 75",
        "       ->| ",
        "       ->| #### 75",
    ]
    shown = sample_text("?", "a" * 5000 + "z", 0.0)
    assert len(shown) < 1300 and shown.endswith("z") and "aaa [...] aaa" in shown


def test_a_sample_cannot_command_the_terminal():
    assert sample_text("?", "\x1b[2J\ra", 0.0) == "  sample | ? -> \ufffd[2J\ufffda | reward 0"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "\\ud800"}', "is not valid Unicode"),
        ("[" * 100_000, "not valid JSON"),
        ("9" * 5000, "not valid JSON"),
    ],
    ids=["half a surrogate pair", "nested without end", "a number without end"],
)
def test_rows_that_nothing_can_work_with_are_refused(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"a": 1}\n' + line + "\n", encoding="utf-8")
    rows = read_rows(str(path))
    assert next(rows) == (f"{path}:1", {"a": 1})
    with pytest.raises(ValueError, match=f"^{path}:2: {message}"):
        next(rows)
