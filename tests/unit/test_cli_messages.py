"""Claims about the command line's own part: which commands there are, exit codes, and what errors say."""

import importlib
import subprocess
import sys
from typing import Literal

import pytest
from helpers.commands import here

from lit_gpt_dist import __version__
from lit_gpt_dist.cli import COMMANDS, guarded, main
from lit_gpt_dist.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from lit_gpt_dist.help import COMMON
from lit_gpt_dist.parsing import describe, strategy_by_class, unknown_option, wrong_value

KNOWN = dict.fromkeys(["model.size", "model.kv_heads", "trainer.max_steps", "trainer.max_time", "optim.lr", "tag"])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_main(name: str) -> None:
    assert callable(importlib.import_module(COMMANDS[name][0]).main)


def test_overview_names_every_command_and_version_is_the_packages() -> None:
    assert all(f"  {name} " in here("--help").out for name in COMMANDS)
    assert here().out == here("--help").out
    assert here("--version").out.strip() == f"lit-gpt-dist {__version__}"


def test_help_is_one_screen_of_common_options_and_names_the_way_to_all(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    common, every = here("fit", "--help").out, here("fit", "--help.all").out
    assert len(common.splitlines()) < 40
    assert "--help.all shows every option" in common
    assert "folder of results, checkpoints and runs (default: logs)" in common
    options = [f"--{name}" for group in COMMON.values() for name in group]
    assert [option for option in options if option not in common or f"{option} " not in every] == []
    assert "--monitor.spike_factor" in every
    texts = " ".join(every.split())  # two options of one name say which text each is about
    assert (
        "text printed after training, by the exported weights; 0: none. Of those logged while training: --monitor"
        in texts
    )
    assert "text logged for TensorBoard at each validation" in texts
    assert "The one printed after training has --sample_tokens" in texts
    assert "--trainer.max_steps" not in here("validate", "--help").out
    for name in ("DDP", "ddp"):
        assert "bucket_cap_mb" in here("fit", "--trainer.strategy.help", name).out


def test_tools_start_without_torch() -> None:
    """plan and doctor answer in a blink: importing their modules must not import torch or lightning."""
    for name in ("plan", "report"):
        code = f"import sys, {COMMANDS[name][0]}; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0, name


def test_ctrl_c_while_libraries_are_imported_is_130_too(monkeypatch, capsys) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["fit"]) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == ""


def test_a_users_mistake_is_code_2_and_ctrl_c_is_130_and_a_defect_keeps_its_traceback(capsys) -> None:
    def mistaken(_: list[str]) -> int:
        raise UserError("batch 5 does not divide; use 4")

    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    def broken(_: list[str]) -> int:
        raise ZeroDivisionError("a defect")

    assert guarded(mistaken, []) == EXIT_USER_ERROR
    assert capsys.readouterr().err == "error: batch 5 does not divide; use 4\n"
    assert guarded(interrupted, []) == EXIT_INTERRUPTED
    with pytest.raises(ZeroDivisionError, match="a defect"):
        guarded(broken, [])


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--modle.size", "model.size"),
        ("--model.kvheads=2", "model.kv_heads"),
        ("--trainer.max_step", "trainer.max_steps"),
        ("--trainer.max-steps", "trainer.max_steps"),
        ("--max_steps", "trainer.max_steps"),
        ("--lr", "optim.lr"),
        ("--tagg", "tag"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_one_meant(given: str, meant: str) -> None:
    assert unknown_option(given, KNOWN) == f"unknown option {given.split('=')[0]}; did you mean --{meant}?"


def test_an_option_like_no_other_is_answered_with_where_they_are_listed() -> None:
    assert (
        unknown_option("--frobnicate", KNOWN) == "unknown option --frobnicate; `lit-gpt-dist fit --help.all` lists them"
    )


def test_types_are_told_in_a_persons_words() -> None:
    assert describe(int) == "a whole number"
    assert describe(int | None) == "a whole number"
    assert describe(int | float) == "a whole number or a number"
    assert describe(list[int] | str) == "a list or text"
    assert describe(Literal["none", "full"] | None) == "one of none, full"


def test_a_value_of_no_known_type_keeps_the_parsers_words() -> None:
    assert wrong_value("tag", ['Parser key "tag":', "something else"], KNOWN) == 'Parser key "tag": something else'


def test_options_of_a_strategy_follow_its_name() -> None:
    option = ["--trainer.strategy.units", "model"]
    assert strategy_by_class(["--trainer.strategy", "fsdp2", *option]) == ["--trainer.strategy", "FSDP2", *option]
    assert strategy_by_class(["--trainer.strategy=fsdp2", *option]) == ["--trainer.strategy=FSDP2", *option]
    assert strategy_by_class(["--trainer.strategy", "fsdp2"]) == ["--trainer.strategy", "fsdp2"], (
        "the shorter one is kept"
    )
