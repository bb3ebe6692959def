"""Expands lists of options into cases, and says which cannot be run here and why. Starts nothing."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_gpt_dist.bench.case import Case
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import PRESETS
from lit_gpt_dist.planner.layout import SHARDED

SCALINGS = ("weak", "strong")


@dataclass
class Matrix:
    """The lists to multiply. ``micro`` and ``accumulate`` are per card; ``global_batch`` is for strong scaling."""

    sizes: Sequence[str] = ("tiny",)
    strategies: Sequence[str] = ("single", "ddp", "fsdp2")
    devices: Sequence[int] = (1,)
    micro: Sequence[int] = (16,)
    accumulate: Sequence[int] = (1,)
    precision: Sequence[str | None] = (None,)
    recompute: Sequence[str] = ("none",)
    compile: Sequence[str | None] = (None,)
    bucket_cap_mb: Sequence[float | None] = (None,)
    context: Sequence[int | None] = (None,)
    scaling: Sequence[str] = ("weak",)
    global_batch: int | None = None

    def __post_init__(self) -> None:
        for scaling in self.scaling:
            if scaling not in SCALINGS:
                raise UserError(f"scaling {scaling!r} is not one of {', '.join(SCALINGS)}")
        if "strong" in self.scaling and not self.global_batch:
            raise UserError("strong scaling holds the global batch, but none is given; add --global_batch N")
        for size in self.sizes:
            if size not in PRESETS:
                raise UserError(f"model size {size!r} is not one of {', '.join(PRESETS)}")
        for name in ("devices", "micro", "accumulate"):
            for number in getattr(self, name):
                if number < 1:
                    raise UserError(f"{name} {number} is below 1; give whole numbers from 1 up")


@dataclass(frozen=True)
class Skip:
    what: str
    why: str


@dataclass
class Expansion:
    cases: list[Case] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)

    def add(self, case: Case) -> None:
        """Once each: a switch that an ablation turns may be in the lists too."""
        if all(dataclasses.replace(other, variant=case.variant) != case for other in self.cases):
            self.cases.append(case)

    def skip(self, what: str, why: str) -> None:
        if Skip(what, why) not in self.skipped:
            self.skipped.append(Skip(what, why))


@dataclass(frozen=True)
class Machine:
    """What a machine and this version of `fit` can do, as far as a matrix must know."""

    cards: int | None  # None: processes on a CPU, as many as asked for
    strategy_options: dict[str, frozenset[str]]  # strategy: options its class takes


def expand(matrix: Matrix, machine: Machine) -> Expansion:
    """Every combination once, in the order of the lists; what cannot run is skipped with a reason."""
    found = Expansion()
    lists = (matrix.sizes, matrix.scaling, matrix.accumulate, matrix.micro, matrix.context, matrix.precision)
    switches = (matrix.recompute, matrix.compile, matrix.bucket_cap_mb, matrix.devices, matrix.strategies)
    combinations: Iterable[tuple[Any, ...]] = itertools.product(*lists, *switches)
    for (
        size,
        scaling,
        accumulate,
        micro,
        context,
        precision,
        recompute,
        compiled,
        bucket,
        devices,
        strategy,
    ) in combinations:
        what = f"{size} {strategy} on {devices}"
        if scaling == "strong":
            split = split_batch(matrix.global_batch or 0, micro, devices)
            if split is None:
                found.skip(
                    what,
                    f"a global batch of {matrix.global_batch} does not divide into {devices} cards × micro-batch {micro}",
                )
                continue
            micro_here, accumulate_here = split
        else:
            micro_here, accumulate_here = micro, accumulate
        case = Case(
            size, strategy, devices, micro_here, accumulate_here, precision, recompute, compiled, context=context
        )
        why = unable(case, machine)
        if why:
            found.skip(what, why)
        elif bucket is None:
            found.add(case)
        elif "bucket_cap_mb" in machine.strategy_options[strategy]:
            found.add(dataclasses.replace(case, strategy_options=(("bucket_cap_mb", bucket),)))
        else:
            found.add(case)  # a strategy without buckets is measured once
    return found


def split_batch(global_batch: int, micro: int, devices: int) -> tuple[int, int] | None:
    """(micro-batch, accumulation) on each card; a smaller micro-batch where the cards are too many for the one asked for."""
    if global_batch % devices:
        return None
    per_card = global_batch // devices
    micro = min(micro, per_card)
    return (micro, per_card // micro) if per_card % micro == 0 else None


def unable(case: Case, machine: Machine) -> str:
    """Why the case cannot run here, or nothing."""
    if case.strategy not in machine.strategy_options:
        return f"this version has no strategy {case.strategy} (it has {', '.join(machine.strategy_options)})"
    if machine.cards is not None and case.devices > machine.cards:
        return f"this machine has {machine.cards} card{'s' if machine.cards != 1 else ''}"
    if case.strategy == "single" and case.devices > 1:
        return "single is one card by definition"
    if case.precision in ("16-mixed", "16") and machine.cards is None:
        return "precision 16-mixed does not run on a CPU; use bf16-mixed or 32-true"
    if case.precision in ("16-mixed", "16") and case.strategy in SHARDED:
        return f"precision 16-mixed does not run under {case.strategy}; use bf16-mixed or 32-true"
    return ""


# ---- ablations ---------------------------------------------------------------------------------------------------------

BUCKETS_MB = (1, 5, 100)  # around DDP's own 25


def _has(option: str) -> Callable[[Case, Machine], bool]:
    return lambda case, machine: case.devices > 1 and option in machine.strategy_options[case.strategy]


def _no_sync(case: Case, machine: Machine) -> list[Case]:
    if case.accumulate == 1 or not _has("no_sync")(case, machine):
        return []  # with one micro-batch a step there is nothing to leave out
    return [case.with_strategy_option("no_sync", False, "no_sync off")]


def _overlap(case: Case, machine: Machine) -> list[Case]:
    """Both: what is on by default depends on the link."""
    if not _has("overlap")(case, machine):
        return []
    without_size = tuple(option for option in case.strategy_options if option[0] != "bucket_cap_mb")
    off = dataclasses.replace(case, strategy_options=without_size)
    return [
        case.with_strategy_option("overlap", True, "overlap on"),
        off.with_strategy_option("overlap", False, "overlap off"),
    ]


def _buckets(case: Case, machine: Machine) -> list[Case]:
    if not _has("bucket_cap_mb")(case, machine):
        return []
    # who gives them a size gets buckets, also where there are none by default
    return [case.with_strategy_option("bucket_cap_mb", size, f"overlap on, bucket {size} MB") for size in BUCKETS_MB]


def _reshard(case: Case, machine: Machine) -> list[Case]:
    if not _has("reshard_after_forward")(case, machine):
        return []
    off = case.with_strategy_option("reshard_after_forward", False, "reshard_after_forward off")
    if not _has("units")(case, machine):
        return [off]
    # what is gathered at once is kept anyway
    return [off.with_strategy_option("units", "blocks", "units blocks, reshard_after_forward off")]


def _units(case: Case, machine: Machine) -> list[Case]:
    """Both: which of them a run has anyway, it decides by its model and machine."""
    if not _has("units")(case, machine):
        return []
    return [case.with_strategy_option("units", units, f"units {units}") for units in ("blocks", "model")]


def _recompute(case: Case, machine: Machine) -> list[Case]:
    return [dataclasses.replace(case, recompute="full", variant="recompute full")] if case.recompute == "none" else []


def _compile(case: Case, machine: Machine) -> list[Case]:
    if case.compile == "none":
        return []
    return [dataclasses.replace(case, compile="none", variant="compile off")]


def _cuda_graph(case: Case, machine: Machine) -> list[Case]:
    if case.cuda_graph == "false":
        return []
    return [dataclasses.replace(case, cuda_graph="false", variant="CUDA graph off")]


def _precision(case: Case, machine: Machine) -> list[Case]:
    other = "bf16-mixed" if case.precision == "32-true" else "32-true"
    return [dataclasses.replace(case, precision=other, variant=f"precision {other}")]


ABLATIONS: dict[str, Callable[[Case, Machine], list[Case]]] = {
    "no_sync": _no_sync,
    "overlap": _overlap,
    "bucket": _buckets,
    "recompute": _recompute,
    "reshard": _reshard,
    "units": _units,
    "compile": _compile,
    "cuda_graph": _cuda_graph,
    "precision": _precision,
}


def add_ablations(expansion: Expansion, names: Iterable[str], machine: Machine) -> None:
    """Appends, for every case, each switch turned alone. A switch that no case has is skipped by name."""
    bases = list(expansion.cases)
    for name in names:
        if name not in ABLATIONS:
            raise UserError(f"ablation {name!r} is not one of {', '.join(ABLATIONS)}, all")
        variants = [variant for case in bases for variant in ABLATIONS[name](case, machine)]
        if not variants:
            expansion.skip(
                f"ablation {name}", "no case has this switch (several cards, and for no_sync accumulation, are needed)"
            )
        for variant in variants:
            expansion.add(variant)
