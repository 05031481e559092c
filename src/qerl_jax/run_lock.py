"""The lock that a process holds on a run folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LOCK = ".lock"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the run folder for this process; the lock goes with it, however it ends.

    Raises ValueError when another process holds it.
    """
    while True:
        with naming(path):
            file = lock_file(path).open("a")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"run_dir: {path} is in use by another process") from None
            if not _is_at(file, lock_file(path)):
                continue  # its holder has just removed it
            try:
                yield
            finally:
                lock_file(path).unlink(missing_ok=True)
            return


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def lock_file(path: Path) -> Path:
    """Return where the lock of a run folder lies."""
    # Beside the folder, which may be renamed; inside of a mount point of somebody else's folder.
    beside = path.absolute().with_name(f".{path.absolute().name}.lock")
    return path / LOCK if path.is_dir() and not os.access(beside.parent, os.W_OK) else beside


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the run folder in what the operating system refuses."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"run_dir: {path} cannot be written ({reason})") from error
