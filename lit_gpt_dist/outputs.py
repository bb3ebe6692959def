"""Puts what a command made where it was asked for, and spares what is there. Knows nothing of what it is."""

import os
import shutil
from pathlib import Path

from lit_gpt_dist.errors import UserError


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raises UserError where something is at ``path`` and nobody said to replace it."""
    if not overwrite and os.path.lexists(path):
        raise UserError(f"{path} exists already; give another --out, or --overwrite to replace it")


def put_in_place(made: Path, path: Path) -> None:
    """Renames the folder ``made``, which lies beside ``path``. What was there goes only after the new folder has its name,
    and is back where it does not get it."""
    previous = made.with_name(made.name + ".previous")
    there = os.path.lexists(path)
    if there:
        path.rename(previous)
    try:
        made.rename(path)
    except BaseException:  # a signal too
        if there:
            previous.rename(path)
        raise
    if previous.is_symlink():
        previous.unlink()  # a link alone: what it leads to was not made here
    shutil.rmtree(previous, ignore_errors=True)
