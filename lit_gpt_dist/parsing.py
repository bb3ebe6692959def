"""Makes one readable line of what jsonargparse says about a command line or a config file. Knows two options by name:
``trainer.precision``, of whose many values this project runs four, and ``trainer.strategy``, whose names stand for classes."""

import difflib
import re
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from lightning.pytorch.cli import LightningArgumentParser

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.help import FULL, first_screen
from lit_gpt_dist.parallel import STRATEGIES

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "64-true")
KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}

IN_TEXT = re.compile(r' in "<[^"]*>", (?=line)')  # where YAML's reader stumbled
IMPORTED = "give a class that Python imports, as MODULE.NAME"


class Parser(LightningArgumentParser):
    """Errors are one line; a misspelt option gets a suggestion, and is never taken for the one it begins."""

    _config_file: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"allow_abbrev": False}))

    def format_help(self, *formatter: Any) -> str:
        """Short where there is an option for the whole: jsonargparse also makes parsers of this class for single classes."""
        return first_screen(self, self.prog.split()[-1]) if FULL[2:] in known_options(self) else self.full_help()

    def full_help(self) -> str:
        return super().format_help()

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a config file; remembers which, for what ``error`` says of it."""
        self._config_file = cfg_path
        parsed = super().parse_path(cfg_path, *args, **kwargs)
        self._config_file = None
        return parsed

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(readable(message, known_options(self), self._config_file))


def strategy_by_class(arguments: list[str]) -> list[str]:
    """``--trainer.strategy fsdp2`` as its class where options of it follow, for the parser gives options to classes alone."""
    option = "--trainer.strategy"
    if not any(word.startswith(f"{option}.") for word in arguments):
        return arguments
    found = list(arguments)
    for at, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if equals and name in (option, f"{option}.help") and (strategy := STRATEGIES.get(value)):
            found[at] = f"{name}={strategy.__name__}"
        elif at and arguments[at - 1] in (option, f"{option}.help") and (strategy := STRATEGIES.get(word)):
            found[at] = strategy.__name__
    return found


def known_options(parser: Any) -> dict[str, Any]:
    """Name without dashes of each option, those of the subcommands included: its argparse action."""
    known: dict[str, Any] = {}
    for action in parser._actions:
        known |= {name.lstrip("-"): action for name in action.option_strings if name.startswith("--")}
        if action.dest == "subcommand":
            for subparser in (action.choices or {}).values():
                known |= known_options(subparser)
    return {name: action for name, action in known.items() if not name.endswith("help")}


def readable(message: str, known: dict[str, Any], config_file: Any = None) -> str:
    """jsonargparse's message as one line with value, rule and remedy.

    Args:
        known: what ``known_options`` gives.
        config_file: the one being read, if one is.
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
    if line.startswith(("Problems parsing config", "Unexpected config")) or IN_TEXT.search(line):
        return no_yaml(line, config_file)
    if found := re.match(r'Parser key "config": (.*)', line):  # given as text: what was wrong in it has been told
        return found[1]
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


def no_yaml(line: str, config_file: Any) -> str:
    """For a config file, or text given in its place, that is no YAML, or none with options."""
    what = f"config file {config_file}" if config_file else "the text given as --config"
    reason = IN_TEXT.sub(" at ", line.partition(": ")[2]) if IN_TEXT.search(line) else ""
    return f"{what} holds no options in YAML{f' ({reason})' if reason else ''}; write them as in configs/tiny.yaml"


def wrong_value(name: str, lines: list[str], known: dict[str, Any]) -> str:
    """For a value that is not of its option's type: the value, and what it may be."""
    value = next((found[1] for line in reversed(lines) if (found := re.search(r"(?:Got|Given) value: (.*)", line))), "")
    if fault := wrong_class(name, value, lines):
        return fault
    if name == "trainer.strategy":
        return "strategy: options belong to one that is named before them on the command line: --trainer.strategy ddp (or fsdp2, hsdp)"
    if name == "trainer.precision":
        return f"precision {value} is not one of {', '.join(PRECISIONS)}"
    if name in ("seed_everything", "model.seed"):
        return f"seed_everything {value.lower()} is not a whole number; give for example 1337"
    hint = type_of(known.get(name))
    allowed = describe(hint)
    if not value or not allowed:
        return " ".join(lines)
    return f"{name} {value} is not {allowed}{nearest_of(value, literals(hint))}"


def wrong_class(name: str, value: str, lines: list[str]) -> str | None:
    """For an option that takes a class and its arguments: which of them, and why not. None: it is about neither."""
    fault, detail = fault_of(lines)
    # one argument of a class named before it
    if argument := re.match(r"NestedArg\(key='.*?', val='?(.*?)'?\)$", value):
        value = argument[1]
    if found := re.match(r"Problem with given class_path '(.*)'", fault):
        return f"{name} {found[1]}: {detail}; {IMPORTED}"
    if fault.startswith("Expected a dot import path string") and not argument:
        return f"{name} {value}: there is no such class; {IMPORTED}"
    if found := re.match(r"Import path does not correspond to a subclass of (\w+)", fault):
        return f"{name} {value} is not a {found[1]}; {IMPORTED}"
    if found := re.match(r"the following arguments are required: (.+)", fault):
        missing = found[1].split(", ")
        return f"{name} {lacking(value, missing[0])} needs {' and '.join(missing)}; add --{name}.{missing[0]} VALUE"
    if found := re.match(r"unknown option (\S+); (did you mean --)?(\S+)", fault):
        remedy = f"{found[2]}{name}.{found[3]}" if found[2] else f"--{name}.help CLASS lists those of a class"
        return f"unknown option --{name}.{found[1]}; {remedy}"
    return f"{name}.{fault}" if " is not " in fault else None


def fault_of(lines: list[str]) -> tuple[str, str]:
    """The first reason of a refused value that says more than that it is of another type, and the line behind it."""
    reasons = lines[lines.index("Errors:") + 1 :] if "Errors:" in lines else []
    at = next((i for i, line in enumerate(reasons) if line.startswith("- ") and "Expected a <class" not in line), None)
    return ("", "") if at is None else (reasons[at][2:], " ".join(reasons[at + 1 : at + 2]))


def lacking(value: str, argument: str) -> str:
    """The name of the class, of perhaps several, that has no such argument."""
    classes = re.findall(r"class_path'?[=:] ?'([\w.]+)'(.*?)(?=class_path|$)", value)
    names = [path for path, arguments in classes if f"{argument}=None" in arguments] or [path for path, _ in classes]
    return (names or [value])[-1].rpartition(".")[2]


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
