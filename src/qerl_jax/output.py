"""What `--out` may name."""

import os
from collections.abc import Mapping
from pathlib import Path

from qerl_jax.metrics import is_stream
from qerl_jax.run_folder import is_own, is_run


def check_output(target: str, *, sources: Mapping[str, str | None]) -> None:
    """Refuse a file that could not be written, or is needed, before any work is done for it.

    `sources` are the files and folders that are read, by what names them; neither they nor the
    records of a run may be replaced. Raises ValueError.
    """
    if Path(target).is_dir():
        raise ValueError(f"--out: {target} is a folder")
    if target == "-" or is_stream(target):
        return
    path = Path(os.path.realpath(target))
    parent = path.parent
    if path.exists():
        _check_not_read(target, sources)
    for folder, child in zip(path.parents, (path, *path.parents), strict=False):
        if is_run(folder) and is_own(child.name):
            raise ValueError(f"--out: {target} belongs to the run {folder}")
    if not parent.is_dir():
        raise ValueError(f"--out: {target} cannot be written, as {parent} is no folder")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"--out: {target} cannot be written, as {parent} is read-only")


def _check_not_read(target: str, sources: Mapping[str, str | None]) -> None:
    path = Path(os.path.realpath(target))
    for name, source in sources.items():
        source = Path(os.path.expanduser(source)) if source else None
        if source and source.is_file() and source.samefile(path):
            raise ValueError(f"--out: {target} is the file that {name} reads")
        if source and source.is_dir() and source.resolve() in path.parents:
            raise ValueError(f"--out: {target} lies in the folder that {name} reads")
