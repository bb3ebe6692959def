"""The command line: which command is which module, and how errors reach a person. Nothing else.

``plan`` and ``doctor`` start in a blink because nothing is imported before the command is known.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from lit_gpt_dist import __version__
from lit_gpt_dist.arguments import nearest
from lit_gpt_dist.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR, UserError

COMMANDS = {  # name: (module with main(argv) -> exit code, what it does)
    "fit": ("lit_gpt_dist.fit", "train a GPT; with no options a small one on this Python's own sources"),
    "validate": ("lit_gpt_dist.fit", "validation loss of a checkpoint"),
    "test": ("lit_gpt_dist.fit", "the same on the corpus given, as Lightning's test stage"),
    "generate": ("lit_gpt_dist.generate", "text from a checkpoint or an export"),
    "prepare": ("lit_gpt_dist.data.prepare", "text files to token shards"),
    "export": ("lit_gpt_dist.checkpoint.export", "a checkpoint to full weights: safetensors or a Hugging Face folder"),
    "import": ("lit_gpt_dist.checkpoint.importing", "GPT-2 and Llama folders to weights that fit and generate open"),
    "bench": ("lit_gpt_dist.bench.command", "run a matrix of configurations"),
    "report": ("lit_gpt_dist.report.command", "tables, curves and pictures from results"),
    "trace": ("lit_gpt_dist.trace.command", "what traced steps were spent on, and who was missing in a hang"),
    "plan": ("lit_gpt_dist.planner.command", "memory, communication and time of a model on a machine"),
    "doctor": ("lit_gpt_dist.doctor.command", "what this machine is and what will not work"),
}
STAGES = ("fit", "validate", "test")  # LightningCLI's own subcommands: they want their name among the arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (``errors.py`` lists them)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return EXIT_OK
    if arguments[0] == "--version":
        print(f"lit-gpt-dist {__version__}")
        return EXIT_OK
    name = arguments[0]
    if name not in COMMANDS:
        return complain(f"unknown command {name}{nearest(name, list(COMMANDS))} (`lit-gpt-dist --help` lists them)")
    module = COMMANDS[name][0]
    # importing takes seconds: guarded, too
    return guarded(
        lambda given: importlib.import_module(module).main(given), arguments if name in STAGES else arguments[1:]
    )


def guarded(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """A user's mistake becomes one line; Ctrl+C its exit code; anything else is a defect and keeps its traceback."""
    try:
        return command(arguments)
    except UserError as mistake:
        return complain(str(mistake))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        return complain(f"{error.filename}: {error.strerror}; give another path")
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def complain(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USER_ERROR


def overview() -> str:
    lines = [f"  {name:9s} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lit-gpt-dist COMMAND [options]",
            "",
            *lines,
            "",
            "`lit-gpt-dist COMMAND --help` shows a command's options",
        ]
    )


def console_script() -> None:
    sys.exit(main())
