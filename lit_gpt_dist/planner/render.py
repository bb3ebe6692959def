"""Plans as tables and sentences for a terminal. Formats numbers; computes none."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape

from lit_gpt_dist.planner.advice import NAMES, Advice
from lit_gpt_dist.planner.columns import Table
from lit_gpt_dist.planner.compare import Comparison, miss
from lit_gpt_dist.planner.estimate import Estimate, Times
from lit_gpt_dist.planner.footprint import KINDS
from lit_gpt_dist.planner.hardware import GIB
from lit_gpt_dist.planner.inference import InferencePlan
from lit_gpt_dist.planner.job import Job
from lit_gpt_dist.planner.layout import NOT_TRAINABLE

UNKNOWN = "?"
RUNS_NAMED = 3
MISS_ALLOWED = {"memory": 0.10, "step": 0.15}


def number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    return UNKNOWN if value is None else f"{value / scale:,.{digits}f}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def fits_word(found: Estimate) -> str:
    return {True: "[green]yes[/]", False: "[red]no[/]", None: UNKNOWN}[found.fits]


def memory_table(estimates: Iterable[Estimate]) -> Table:
    rows = []
    for found in estimates:
        if found.footprint is None:
            continue
        kinds = [number(found.footprint.kinds[kind], GIB, 2) for kind in KINDS]
        rows.append([label(found), fits_word(found), number(found.peak_bytes, GIB), *kinds, found.footprint.moment])
    return Table(
        "Memory of one card at its peak, GiB",
        ("strategy", "fits", "peak", *KINDS, "moment"),
        rows,
        first_to_go=("workspace", "buffers", "moment", "copies", "logits", "weights", "gradients", "optimizer"),
        left=("strategy", "fits", "moment"),
    )


def label(found: Estimate) -> str:
    return found.strategy if found.trainable else f"{found.strategy} [dim]*[/]"


def time_table(estimates: Iterable[Estimate]) -> Table:
    rows = []
    for found in estimates:
        if found.impossible:
            continue
        times = found.times or Times(None, None, None, None, None)
        seconds = (times.communication, times.exposed, times.compute, times.step, times.serial_step)
        rows.append([
            label(found),
            str(found.accumulate),
            number(found.sent_bytes, 1e9, 2),
            number(found.sent_without_no_sync, 1e9, 2),
            *(number(value, 1e-3) for value in seconds),
            number(found.tokens_per_second, digits=0),
            percent(found.mfu),
            percent(found.efficiency),
        ])  # fmt: skip
    headers = ("strategy", "accum", "GB sent", "no no_sync", "comm ms", "exposed ms", "compute ms", "step ms", "no overlap",
               "tok/s", "MFU", "eff.")  # fmt: skip
    less_important = (
        "no no_sync",
        "no overlap",
        "GB sent",
        "comm ms",
        "accum",
        "compute ms",
        "MFU",
        "exposed ms",
        "eff.",
    )
    return Table("One optimizer step", headers, rows, less_important, ("strategy",))


def limits_table(rows: Iterable[tuple[Estimate, int | None, float | None]]) -> Table:
    cells = [
        [label(found), UNKNOWN if micro_batch is None else str(micro_batch), number(parameters, 1e9, 2)]
        for found, micro_batch, parameters in rows
    ]
    headers = ("strategy", "largest micro-batch", "largest model, B parameters")
    return Table("Limits", headers, cells, left=("strategy",))


def activation_table(job: Job, rows: Iterable[tuple[str, list[float]]]) -> Table:
    cells = [[name, *(number(each, GIB, 2) for each in found)] for name, found in rows]
    headers = ("attention", "kept", "recompute selective", "recompute full")
    where = (
        "" if job.recompute_blocks is None else f", recomputed in {job.blocks_recomputed} of {job.model.layers} blocks"
    )
    return Table(f"Activations of one micro-batch on one card{where}, GiB", headers, cells, left=("attention",))


def heading(job: Job, size: str) -> list[str]:
    model = job.model
    lines = [
        f"{size}: {model.parameters() / 1e6:,.1f}M parameters, {model.layers} layers, width {model.width}, "
        f"context {model.context}, vocabulary {model.vocab_size:,}",
        f"{job.nodes} × {job.devices} {job.device.name}, link {job.link.name} ({job.link.source}), {job.precision}, {job.optimizer}, "
        f"recompute {job.recompute_words}, {job.execution}; global batch {job.global_batch} windows, micro {job.micro_batch}",
    ]
    if job.calibration and job.rates:
        lines.append(f"rates measured on {job.calibration.device}, {job.calibration.when}")
    elif job.device.peak_flops and job.precision != "32-true":
        lines.append(
            f"no calibration matches: compute assumes {job.mfu:.0%} MFU (--mfu); `doctor --measure` on that machine replaces it"
        )
    else:
        lines.append(
            f"compute time unknown: no peak for {job.device.name} in {job.precision} and no calibration; no MFU either"
        )
    if job.device.memory_bytes is None:
        lines.append(f"memory of {job.device.name} unknown: nothing can be said to fit (--memory_gib)")
    else:
        lines.append(
            f"a card has {job.device.memory_bytes / GIB:.1f} GiB, {job.reserve_bytes / GIB:g} of them kept free (--reserve_gib)"
        )
    return lines


def print_plan(console: Console, estimates: list[Estimate]) -> None:
    memory_table(estimates).print_to(console)
    time_table(estimates).print_to(console)
    if any(not found.trainable and not found.impossible for found in estimates):
        console.print(f"* planned only: `fit` of this version does not run {', '.join(NOT_TRAINABLE)}")
    for why in dict.fromkeys(found.impossible for found in estimates if found.impossible):
        names = ", ".join(found.strategy for found in estimates if found.impossible == why)
        console.print(f"{names}: {escape(why)}", highlight=False)


def print_advice(console: Console, advice: Advice, model_options: str) -> None:
    chosen = NAMES[advice.strategy] if advice.strategy else "nothing"
    console.print(f"\n[bold]Recommended: {chosen}[/] — {escape(advice.reason)}.")
    if command := advice.command(model_options):
        console.print(f"  {escape(command)}", soft_wrap=True, highlight=False)
    if advice.faster and advice.strategy:
        line = advice.faster.sentence(advice.strategy, model_options)
        console.print(f"  {escape(line)}", soft_wrap=True, highlight=False)
    for line in advice.notes:
        console.print(f"  note: {escape(line)}")
    if advice.ruled_out:
        console.print("Ruled out, in order of cost:")
    for line in advice.ruled_out:
        console.print(f"  - {escape(line)}")


def inference_table(plans: Iterable[InferencePlan]) -> Table:
    rows = [
        [
            number(plan.weights_bytes, GIB, 2),
            str(plan.bits),
            number(plan.cache_bytes, GIB, 2),
            number(plan.total_bytes, GIB, 2),
            UNKNOWN if plan.cards is None else str(plan.cards),
            UNKNOWN if plan.largest_batch is None else str(plan.largest_batch),
        ]
        for plan in plans
    ]
    headers = ("weights", "bits", "key/value cache", "total", "cards", "largest batch on one card")
    return Table("Inference, GiB", headers, rows, first_to_go=("key/value cache", "weights"))


def marked(pair: tuple[float, float] | None, allowed: float) -> str:
    found = miss(pair)
    if found is None:
        return UNKNOWN
    return f"[{'green' if abs(found) <= allowed else 'red'}]{found:+.1%}[/]"


def comparison_table(comparisons: Iterable[Comparison]) -> Table:
    rows = []
    for one in comparisons:
        memory, step = one.memory_gib or (None, None), one.step_ms or (None, None)
        rows.append([
            escape(one.tag), escape(one.mode), escape(one.size), str(one.micro), escape(one.recompute_words),
            number(memory[0], digits=2), number(memory[1], digits=2), marked(one.memory_gib, MISS_ALLOWED["memory"]),
            number(step[0]), number(step[1]), marked(one.step_ms, MISS_ALLOWED["step"]),
        ])  # fmt: skip
    headers = (
        "tag",
        "mode",
        "size",
        "micro",
        "recompute",
        "GiB planned",
        "GiB run",
        "GiB miss",
        "ms planned",
        "ms run",
        "ms miss",
    )
    return Table(
        "Planned against measured",
        headers,
        rows,
        first_to_go=("recompute", "micro", "ms planned", "GiB planned", "size", "ms run", "GiB run"),
        left=("tag", "mode", "size", "recompute"),
    )


def reasons(comparisons: Sequence[Comparison]) -> list[str]:
    """Why there is a ``?``: a line for each reason, with the runs it is true of."""
    lines = []
    for why in dict.fromkeys(one.why for one in comparisons if one.why):
        runs = list(dict.fromkeys(f"{one.tag} ({one.mode}, {one.size})" for one in comparisons if one.why == why))
        names = ", ".join(runs[:RUNS_NAMED]) + (f" and {len(runs) - RUNS_NAMED} more" if len(runs) > RUNS_NAMED else "")
        lines.append(f"{names}: {why}")
    return lines
