"""The argument parser of the tools that start in a blink (plan, doctor, report, ...), and how a program is typed. Imports neither
torch nor lightning."""

import argparse
import difflib
import shlex
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from lit_gpt_dist.errors import EXIT_USER_ERROR


class ToolParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line, with a suggestion for a misspelt option."""

    def __init__(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unknown_option_message(unknown[0], list(self._option_string_actions)))
        return parsed

    def error(self, message: str) -> NoReturn:
        print(f"error: {message} (see `{self.prog} --help`)", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def unknown_option_message(option: str, known: list[str]) -> str:
    """One line that names the unknown option and the nearest known one, where there is one."""
    name = option.split("=")[0]
    return f"unknown option {name}{nearest(name, known)}"


def nearest(name: str, known: list[str]) -> str:
    """``; did you mean X?``, or nothing where nothing known is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def typed(program: str) -> str:
    """How to type a program of this environment: by its name where the shell finds it, else by its path."""
    if shutil.which(program):
        return program
    beside = Path(sys.executable).parent / program
    inside = beside.is_relative_to(Path.cwd())
    return shlex.quote(str(beside.relative_to(Path.cwd()) if inside else beside)) if beside.exists() else program
