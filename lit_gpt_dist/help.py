"""The first screen of ``fit --help``: the options that most runs want, in groups. ``--help.all`` shows the parser's own page."""

import argparse
import shutil
import textwrap
from typing import Any

FULL = "--help.all"
TRAINING = "training, in optimizer steps"
COMMON = {  # an option without its dashes: what it is, and what happens without it where its default is null
    "model and text": {
        "config": "a YAML file of options as in configs/; several merge, and options given beside it win",
        "model.size": "tiny, baby, gpt2, big, gpt2-124m or 4b; without it baby on a GPU, tiny on a CPU",
        "model.context": "tokens a window feeds; without it the size's",
        "data.corpus": "UTF-8 file, folder or glob, or a folder of `prepare`; without it Python's own sources",
        "data.tokenizer": "char, char:ru-en, byte or a tokenizer.json; without it what suits the corpus",
    },
    "machine": {
        "trainer.devices": "how many, or which",
        "trainer.num_nodes": "machines",
        "trainer.accelerator": "cpu or gpu",
        "trainer.strategy": "single, ddp, fsdp2 or hsdp",
        "trainer.precision": "32-true, bf16-mixed, 16-mixed or 64-true; without it bf16-mixed on a GPU, 32-true on a CPU",
    },
    TRAINING: {
        "trainer.max_steps": "length of the run; -1: what suits tiny and baby",
        "data.global_batch": "windows a step, over all devices; without it micro-batch × accumulation × devices",
        "data.micro_batch": "windows a device forwards at once; without it what suits the size",
        "optim.lr": "peak learning rate; without it what suits the size",
        "optim.schedule_steps": "length of the schedule, for runs that will go further; without it the run's",
        "trainer.val_check_interval": "steps between validations; without it ten in a run",
        "checkpoint.every_n_steps": "steps between checkpoints; without it one at the end",
        "checkpoint.keep_last": "how many of the newest stay",
    },
    "run": {
        "tag": "name of the run; without it size and time",
        "trainer.default_root_dir": "folder of results, checkpoints and runs",
        "ckpt_path": "checkpoint to go on from: last, or a path",
        "seed_everything": "initial weights, dropout and windows",
    },
}


class FullHelp(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: Any, *_: Any) -> None:
        print(parser.full_help(), end="")
        parser.exit()


def first_screen(parser: Any, command: str) -> str:
    """The common options of ``command`` with the parser's defaults."""
    columns = max(60, shutil.get_terminal_size().columns)
    lines = [f"usage: lit-gpt-dist {command} [--GROUP.OPTION VALUE ...]"]
    for title, options in COMMON.items():
        if title == TRAINING and command != "fit":
            continue
        lines += ["", f"{title}:"]
        for name, words in options.items():
            default = None if name == "config" else parser.get_default(name)
            text = f"  --{name:27s} {words}" + (f" (default: {default})" if default is not None else "")
            lines += textwrap.wrap(text, columns, subsequent_indent=" " * 32, break_on_hyphens=False)
    lines += ["", f"{FULL} shows every option, --print_config what would be run; docs/training.md explains them"]
    return "\n".join(lines) + "\n"
