"""Groups runs into cases and compares cases: medians, spread, scaling efficiency, speed-up. Pure arithmetic."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lit_gpt_dist.model.config import describe_recompute
from lit_gpt_dist.planner.hardware import MIB
from lit_gpt_dist.planner.job import COMPILED_BUCKET_BYTES, DDP_BUCKET_BYTES
from lit_gpt_dist.report.names import unusual_shape
from lit_gpt_dist.report.results import FAILED, OK, OUT_OF_MEMORY, Run

STRATEGIES = ("single", "ddp", "fsdp2", "hsdp", "zero1", "zero2")  # as tables and legends list them


@dataclass(frozen=True)
class Case:
    """The rounds of one configuration. Runs that only differ in tag, seed or corpus are rounds of the same case."""

    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def measured(self) -> list[Run]:
        return [run for run in self.runs if run.status == OK]

    @property
    def status(self) -> str:
        """A case that ran in any round is a measurement; the others are shown by what stopped them."""
        if self.measured:
            return OK
        return OUT_OF_MEMORY if any(run.status == OUT_OF_MEMORY for run in self.runs) else FAILED

    def median(self, value: Callable[[Run], float | None]) -> float | None:
        values = [v for run in self.measured if (v := value(run)) is not None]
        return statistics.median(values) if values else None

    @property
    def tok_s(self) -> float | None:
        return self.median(lambda run: run.tok_s)

    @property
    def spread(self) -> float | None:
        """(largest − smallest) / median of tokens/s over the rounds; None where there is one round only."""
        rates = [run.tok_s for run in self.measured if run.tok_s]
        return (max(rates) - min(rates)) / statistics.median(rates) if len(rates) > 1 else None

    @property
    def options(self) -> str:
        return describe_options(self.first)


def describe_options(run: Run) -> str:
    """What differs from the plain run, in words."""
    compiled = "compile" if run.compile == "yes" else f"compile {run.compile}"
    parts = [run.precision, *([f"dropout {run.dropout:g}"] if run.dropout else [])]
    if run.recompute not in ("none", ""):
        parts.append(f"recompute {describe_recompute(run.recompute, run.recompute_blocks)}")
    if is_compiled(run):
        parts.append(compiled)
    if run.variant:
        return ", ".join([*parts, run.variant])
    if gathered_at_once(run):
        parts.append("units model")
    if averaged_after_backward(run):
        parts.append("overlap off")
    if not has_usual_bucket(run):
        parts.append(f"bucket {run.bucket_cap_mb:g} MB")
    return ", ".join([*parts, *switched_off(run)])


def has_usual_bucket(run: Run) -> bool:
    """Whether the size of ddp's buckets is what it is by default."""
    usual = COMPILED_BUCKET_BYTES if run.compile == "model" else DDP_BUCKET_BYTES
    return run.bucket_cap_mb in (None, usual / MIB)


def gathered_at_once(run: Run) -> bool:
    """Whether fsdp2 gathered the whole model at once, instead of block by block."""
    return run.record.get("units") == "model"


def averaged_after_backward(run: Run) -> bool:
    """Whether ddp averaged gradients when backward was over, instead of meanwhile."""
    return run.record.get("overlap") is False


def switched_off(run: Run) -> list[str]:
    """What is on unless somebody says otherwise; a CPU has no CUDA graph to miss."""
    names = ("no_sync", "reshard_after_forward", *(() if run.on_cpu else ("cuda_graph",)))
    return [f"{name} off" for name in names if run.record.get(name) is False]


def is_compiled(run: Run) -> bool:
    return run.compile not in ("none", "")


def model(run: Run) -> tuple:
    return run.size, run.params, run.context, run.vocab, run.dropout or 0.0, str(sorted(unusual_shape(run).items()))


def arithmetic(run: Run) -> tuple:
    """What two runs must share to differ in nothing but their strategy, cards and batch."""
    return *model(run), run.precision, run.recompute, run.recompute_blocks, run.compile, run.device


def case_key(run: Run) -> tuple:
    return (
        *arithmetic(run),
        run.mode,
        run.world,
        run.micro,
        run.accum,
        run.global_batch,
        run.bucket_cap_mb,
        run.variant,
        gathered_at_once(run),
        averaged_after_backward(run),
        *switched_off(run),
    )


def group_cases(runs: Iterable[Run]) -> list[Case]:
    """Runs by case, sorted as a table reads: size, batch, precision, mode, cards.

    A round that stopped could not count its parameters or name its card: it joins the rounds of its case that ran.
    """
    groups: dict[tuple, list[Run]] = {}
    ran_as: dict[str, tuple] = {}
    stopped = []
    for run in runs:
        if run.status == OK:
            groups.setdefault(case_key(run), []).append(run)
            ran_as.setdefault(run.case or "", case_key(run))
        else:
            stopped.append(run)
    for run in stopped:
        key = ran_as.get(run.case, case_key(run)) if run.case else case_key(run)
        groups.setdefault(key, []).append(run)
    cases = [Case(tuple(group)) for group in groups.values()]
    return sorted(cases, key=lambda case: _reading_order(case.first))


def strategy_order(name: str) -> tuple[int, str]:
    """Sorts unknown strategies behind the known ones, by name."""
    return (STRATEGIES.index(name) if name in STRATEGIES else len(STRATEGIES)), name


def _reading_order(run: Run) -> tuple:
    options = (run.precision, run.recompute, run.recompute_blocks or 0, run.compile, run.variant)
    return (
        run.params or 0,
        run.size,
        run.context or 0,
        run.vocab or 0,
        options,
        strategy_order(run.mode),
        run.world,
        run.micro,
        run.accum,
        run.source,
    )


@dataclass(frozen=True)
class Scaling:
    """A case against the one-card cases it can be compared with; None where there is none."""

    weak_efficiency: float | None  # the same size, micro-batch and accumulation on one card
    strong_efficiency: float | None  # the same size and global batch on one card
    # tok/s over one card's: of the same global batch where that was run, else of the same batch per card
    speed_up: float | None
    beyond_one_card: float | None  # share of the step that one card with the same micro-batches does not need


class Bases:
    """The one-card cases, looked up by what a comparison must hold equal.

    A compiled run is held against a compiled one, by blocks or whole: left to ``auto``, that depends on the strategy.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        self._weak: dict[tuple, list[Case]] = {}
        self._strong: dict[tuple, list[Case]] = {}
        for case in cases:
            run = case.first
            if run.world == 1 and case.tok_s and not run.variant:  # a variant is never a base
                self._weak.setdefault((*_comparable(run), run.micro, run.accum), []).append(case)
                self._strong.setdefault((*_comparable(run), run.global_batch), []).append(case)

    def weak(self, case: Case) -> Case | None:
        run = case.first
        return _base(case, self._weak.get((*_comparable(run), run.micro, run.accum), []))

    def strong(self, case: Case) -> Case | None:
        """Strong scaling asks how fast one card does this batch: its fastest split into micro-batches is the base."""
        return _base(case, self._strong.get((*_comparable(case.first), case.first.global_batch), []))

    def scaling(self, case: Case) -> Scaling:
        weak, strong = self.weak(case), self.strong(case)
        speed_up = ratio(case, strong) or ratio(case, weak)
        return Scaling(
            weak_efficiency=_per_card(ratio(case, weak), case.first.world),
            strong_efficiency=_per_card(ratio(case, strong), case.first.world),
            speed_up=speed_up,
            beyond_one_card=_beyond(case, weak),
        )


def _comparable(run: Run) -> tuple:
    return *model(run), run.precision, run.recompute, run.recompute_blocks, is_compiled(run), run.device


def _base(case: Case, alone: Sequence[Case]) -> Case | None:
    """A strategy on one card is a base only where ``single`` was not run; the same options where there is a choice."""

    def preference(base: Case) -> tuple:
        run, own = base.first, case.first
        other = run.compile != own.compile, switched_off(run) != switched_off(own)
        return run.mode != "single", *other, -(base.tok_s or 0)

    return min(alone, key=preference, default=None)


def ratio(case: Case, base: Case | None) -> float | None:
    return case.tok_s / base.tok_s if base and base.tok_s and case.tok_s else None


def _per_card(speed_up: float | None, world: int) -> float | None:
    """Scaling efficiency = tok/s(N) / (N · tok/s(1)) (facts: with a fixed batch per card that is t(1)/t(N))."""
    return speed_up / world if speed_up is not None else None


def _beyond(case: Case, base: Case | None) -> float | None:
    """(t(N) − t(1)) / t(N): communication that is not hidden, and whatever else the other cards cost. No less than 0."""
    if base is None or case.first.world == 1:
        return None
    step, alone = (c.median(lambda run: run.step_ms) for c in (case, base))
    return max(0.0, (step - alone) / step) if step and alone else None
