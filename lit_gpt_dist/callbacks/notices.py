"""Tells a person something while training, once, without breaking the progress bar. Rank 0 alone prints."""

import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar


def tell(trainer: pl.Trainer, text: str) -> None:
    """Prints ``text`` above the bar; nothing under ``--quiet``."""
    if not trainer.is_global_zero:
        return
    bar: Any = next((c for c in trainer.callbacks if isinstance(c, ProgressBar)), None)  # type: ignore[attr-defined]
    if hasattr(bar, "console"):  # this project's, which prints through rich
        bar.print(text, soft_wrap=True, markup=False)
    elif bar is not None:
        bar.print(text)
    else:
        print(text, flush=True)


def insist(trainer: pl.Trainer, text: str) -> None:
    """As ``tell``; under ``--quiet``, which leaves stdout empty, on stderr: what someone must know to go on."""
    quiet = any(getattr(callback, "quiet", False) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if not quiet:
        tell(trainer, text)
    elif trainer.is_global_zero:
        print(text, file=sys.stderr, flush=True)


class Once:
    """Passes on each message a single time."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, trainer: pl.Trainer, text: str, key: str | None = None) -> None:
        if (key or text) not in self._told:
            self._told.add(key or text)
            tell(trainer, text)


def complain(trainer: pl.Trainer, text: str) -> None:
    """An error's one line, also under ``--quiet``."""
    if trainer.is_global_zero:
        print(f"error: {text}", file=sys.stderr, flush=True)
