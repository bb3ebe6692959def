"""Makes one readable line of what jsonargparse says about a command line or a config file. Knows no option by name but
``trainer.precision``, of whose many values this project runs four."""

import difflib
import re
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from lightning.pytorch.cli import LightningArgumentParser

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.help import FULL, first_screen

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "64-true")
KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}


class Parser(LightningArgumentParser):
    """Errors are one line; a misspelt option gets a suggestion, and is never taken for the one it begins."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"allow_abbrev": False}))

    def format_help(self, *formatter: Any) -> str:
        """Short where there is an option for the whole: jsonargparse also makes parsers of this class for single classes."""
        return first_screen(self, self.prog.split()[-1]) if FULL[2:] in known_options(self) else self.full_help()

    def full_help(self) -> str:
        return super().format_help()

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(readable(message, known_options(self)))


def known_options(parser: Any) -> dict[str, Any]:
    """Name without dashes of each option, those of the subcommands included: its argparse action."""
    known: dict[str, Any] = {}
    for action in parser._actions:
        known |= {name.lstrip("-"): action for name in action.option_strings if name.startswith("--")}
        if action.dest == "subcommand":
            for subparser in (action.choices or {}).values():
                known |= known_options(subparser)
    return {name: action for name, action in known.items() if not name.endswith("help")}


def readable(message: str, known: dict[str, Any]) -> str:
    """jsonargparse's message as one line with value, rule and remedy.

    Args:
        known: what ``known_options`` gives.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    line = " ".join(lines)
    if found := re.match(r"unrecognized arguments: (\S+)", line, re.IGNORECASE):
        if not found[1].startswith("-"):
            return f"unexpected argument {found[1]}; options are written --name value"
        return unknown_option(found[1], known)
    if found := re.search(r"(?:does not accept option|^Option) '(\S+?)'(?: is not accepted)?$", line):
        return unknown_option(found[1], known)
    if found := re.match(r'Parser key "config": .*? does not exist: \'(.*)\'', line):
        return f"config file {found[1]} does not exist; give the path of a YAML file"
    if found := re.match(r'Parser key "config": .*? not a file: \'(.*)\'', line):
        return f"config {found[1]} is not a file; give the path of a YAML file"
    if line.startswith(("Problems parsing config", "Unexpected config")):
        return f"a config file holds no options in YAML ({line}); write them as in configs/tiny.yaml"
    if found := re.match(r"argument (\S+): expected", line):
        allowed = describe(type_of(known.get(found[1].lstrip("-"))))
        return f"option {found[1]} needs a value{f': {allowed}' if allowed else ''}"
    if found := re.match(r"argument (\S+) --> (\S+):", line):
        return f"{found[2]} follows other options; use --{found[1]}.NAME"
    if found := re.match(r'Parser key "(\S+)": Unable to load config \'(.*?)\'', line):
        return f"{found[1]} {found[2]} is not a config file that can be read; set single options as --{found[1]}.NAME"
    if found := re.match(r'Linked "(\S+)" must be given via "(\S+)"', line):
        return f"{found[1]} follows another option; use --{found[2]}"
    if found := re.match(r'Parser key "(\S+?)":', line):
        return wrong_value(found[1], lines, known)
    return line


def wrong_value(name: str, lines: list[str], known: dict[str, Any]) -> str:
    """For a value that is not of its option's type: the value, and what it may be."""
    reasons = [line[2:] for line in lines if line.startswith("- ") and not line.startswith("- Expected a")]
    if name == "trainer.strategy":
        reason = " ".join(lines[lines.index(f"- {reasons[0]}") :]).split("- Expected")[0][2:].strip() if reasons else ""
        return f"strategy: {reason or 'options belong to a class; name it first: --trainer.strategy DDP (or FSDP2)'}"
    value = next((found[1] for line in reversed(lines) if (found := re.search(r"(?:Got|Given) value: (.*)", line))), "")
    if name == "trainer.precision":
        return f"precision {value} is not one of {', '.join(PRECISIONS)}"
    if name in ("seed_everything", "model.seed"):
        return f"seed_everything {value.lower()} is not a whole number; give for example 1337"
    hint = type_of(known.get(name))
    allowed = describe(hint)
    if not value or not allowed:
        return " ".join(lines)
    return f"{name} {value} is not {allowed}{nearest_of(value, literals(hint))}"


def type_of(action: Any) -> Any:
    return getattr(action, "_typehint", None) or getattr(action, "type", None)


def describe(hint: Any) -> str:
    """The values of a type in a person's words; those that are classes are left out."""
    if choices := literals(hint):
        return f"one of {', '.join(choices)}"
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [KINDS.get(member) or KINDS.get(get_origin(member)) for member in members if member is not NoneType]
    return " or ".join(dict.fromkeys(word for word in words if word))


def literals(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return [choice for member in get_args(hint) for choice in literals(member)]
    return []


def unknown_option(option: str, known: dict[str, Any]) -> str:
    """One line that names the unknown option, and the one that was probably meant."""
    name = option.split("=")[0].lstrip("-").replace("-", "_")
    group, _, leaf = name.rpartition(".")
    leaves = [other for other in known if other.rpartition(".")[2] == leaf]
    inside = [other for other in known if group and other.startswith(f"{group}.")]
    near = (
        [name] * (name in known)
        or leaves
        or difflib.get_close_matches(name, inside or list(known), n=1, cutoff=0.7 if inside else 0.6)
    )
    remedy = f"did you mean --{near[0]}?" if near else f"`lit-gpt-dist fit {FULL}` lists them"
    return f"unknown option {option.split('=')[0]}; {remedy}"


def nearest_of(value: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(value, choices, n=1)
    return f"; did you mean {near[0]}?" if near else ""
