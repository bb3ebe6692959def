"""`lit-gpt-dist plan`: asks the planner and prints the answer. Imports no torch."""

import argparse
import dataclasses
import json
from typing import Any, get_args

from rich.console import Console

from lit_gpt_dist.errors import EXIT_OK, UserError
from lit_gpt_dist.model.config import Recompute
from lit_gpt_dist.planner import activations, render, running
from lit_gpt_dist.planner.advice import Advice, Faster, advise
from lit_gpt_dist.planner.calibration import find, to_json
from lit_gpt_dist.planner.compare import compare_line, read_lines
from lit_gpt_dist.planner.estimate import Estimate, estimate
from lit_gpt_dist.planner.explain import FIGURES, explain
from lit_gpt_dist.planner.footprint import strategy_widths
from lit_gpt_dist.planner.inference import InferencePlan, plan_inference
from lit_gpt_dist.planner.job import Job
from lit_gpt_dist.planner.layout import STRATEGIES
from lit_gpt_dist.planner.limits import largest_micro_batch, largest_model_parameters
from lit_gpt_dist.planner.options import job_from, model_options, parser

PIPE_WIDTH = 1000  # characters: what is read by programs or kept in files is neither wrapped nor short of columns


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    job = job_from(options)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    if options.compare:
        return compare(console, options, job)
    if options.task == "inference":
        return inference(console, options, job)
    estimates = [estimate(job, name) for name in ([options.strategy] if options.strategy else STRATEGIES)]
    refuse_what_none_divides(estimates)
    if options.explain:
        chosen = estimates[0] if options.strategy else first_explainable(estimates, job)
        console.print("\n".join(explain(job, chosen, options.explain)), highlight=False, markup=False, soft_wrap=True)
        return EXIT_OK
    advice = advise(job)
    if options.json:
        print(json.dumps(as_json(job, estimates, advice, extras(options, job, estimates, advice)), indent=1))
        return EXIT_OK
    print_all(console, options, job, estimates, advice)
    return EXIT_OK


def refuse_what_none_divides(estimates: list[Estimate]) -> None:
    """A batch that no strategy of these can split is the user's mistake, not a lack of memory.

    Raises:
        UserError: that of the strategy with the most data ranks: a batch that it can split, the others can too.
    """
    laid_out = [found for found in estimates if not found.layout.impossible]
    if laid_out and all(found.impossible for found in laid_out):
        raise UserError(max(laid_out, key=lambda found: found.layout.data_ranks).impossible)


def first_explainable(estimates: list[Estimate], job: Job) -> Estimate:
    """Without --strategy: DDP where there are several cards, else one card."""
    wanted = "ddp" if job.world > 1 else "single"
    return next(found for found in estimates if found.strategy == wanted)


def print_all(
    console: Console, options: argparse.Namespace, job: Job, estimates: list[Estimate], advice: Advice
) -> None:
    console.print(
        "\n".join(render.heading(job, getattr(options, "model.size"))), highlight=False, markup=False, soft_wrap=True
    )
    render.print_plan(console, estimates)
    if options.strategy and not estimates[0].impossible:
        for figure in FIGURES:
            console.print("\n".join(explain(job, estimates[0], figure)), highlight=False, markup=False, soft_wrap=True)
        return
    render.activation_table(job, activation_choices(job)).print_to(console)
    possible = [found for found in estimates if not found.impossible]
    limits = [
        (found, largest_micro_batch(job, found.layout, found.accumulate), largest_model_parameters(job, found.layout))
        for found in possible
    ]
    render.limits_table(limits).print_to(console)
    for line in extras(options, job, estimates, advice)["lines"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    render.print_advice(console, advice, model_options(options))


def activation_choices(job: Job) -> list[tuple[str, list[float]]]:
    """Bytes under each kind of recomputation, with and without flash attention; with the block that is whole again."""
    width = strategy_widths(job, estimate(dataclasses.replace(job, devices=1, nodes=1), "single").layout)
    blocks = job.model.layers if job.recompute_blocks is None else job.recompute_blocks
    rows = []
    for name, flash in (("flash", True), ("not flash", False)):
        found = []
        for recompute in get_args(Recompute):
            layer = activations.layer_saved_bytes(job.model, job.context, width, flash)
            kept = activations.layer_kept_bytes(job.model, job.context, width, flash, recompute)
            saved = activations.saved_bytes(job.model, job.micro_batch, job.context, width, flash, recompute, blocks)
            again = activations.computed_again_bytes(layer, kept, recompute) if blocks == job.model.layers else 0.0
            found.append(saved + job.micro_batch * job.context * again)
        rows.append((name, found))
    return rows


def extras(options: argparse.Namespace, job: Job, estimates: list[Estimate], advice: Advice) -> dict[str, Any]:
    """Answers to the questions about cost, failures and learning rates, as figures and as lines."""
    figures: dict[str, Any] = {}
    lines: list[str] = []
    if options.tokens:
        for found in [estimate(advice.job, advice.strategy)] if advice.strategy else estimates:
            if found.tokens_per_second:
                cost = running.cost(options.tokens, found.tokens_per_second, found.layout.ranks)
                figures[f"cost_{found.strategy}"] = cost._asdict()
                lines.append(
                    f"{options.tokens:g} tokens with {found.strategy}: {cost.days:,.1f} days, {cost.card_hours:,.0f} card-hours"
                )
        if not lines:
            lines.append(f"{options.tokens:g} tokens: time unknown, because the speed is")
    if options.mtbf_hours:
        hours = running.mean_time_between_failures(options.mtbf_hours, job.nodes)
        seconds = running.checkpoint_interval_seconds(options.checkpoint_seconds, hours * 3600)
        figures["checkpoint_interval_seconds"] = seconds
        lines.append(
            f"a failure every {hours:.2f} h on {job.nodes} nodes: save every {seconds / 60:.0f} minutes (√(2·c·T), c {options.checkpoint_seconds:g} s)"
        )
    if options.base_lr and options.base_batch:
        growth = job.global_batch / options.base_batch
        rate = running.scaled_learning_rate(options.base_lr, growth, options.optimizer)
        figures["learning_rate"] = rate
        rule = "× k with warm-up (SGD)" if options.optimizer == "sgd" else "× √k (Adam-like)"
        lines.append(
            f"batch × {growth:g}: learning rate {options.base_lr:g} {rule} = {rate:.3g}; past the critical batch size more buys nothing"
        )
    return {"figures": figures, "lines": lines}


def inference(console: Console, options: argparse.Namespace, job: Job) -> int:
    widths = [options.bits] if options.bits else [16, 8, 4]
    plans = [plan_inference(job.model, options.batch, job.context, bits, job.usable_bytes) for bits in widths]
    if options.json:
        print(json.dumps([plan._asdict() for plan in plans], indent=1))
        return EXIT_OK
    console.print(
        f"{options.batch} sequences of {job.context} tokens on {job.device.name}", highlight=False, markup=False
    )
    render.inference_table(plans).print_to(console)
    console.print(inference_advice(plans, job), highlight=False, markup=False)
    return EXIT_OK


def inference_advice(plans: list[InferencePlan], job: Job) -> str:
    if plans[0].cards is None:
        return f"the memory of {job.device.name} is not known; give --memory_gib"
    if plans[0].cards == 1:
        return f"One card holds it at {plans[0].bits} bits."
    fitting = next((plan for plan in plans if plan.cards == 1), None)
    several = f"{plans[0].cards} cards hold it at {plans[0].bits} bits"
    return (
        f"{several}; one card holds it quantised to {fitting.bits} bits."
        if fitting
        else f"{several}; no width here fits on one."
    )


def compare(console: Console, options: argparse.Namespace, job: Job) -> int:
    comparisons = []
    lines, skipped = read_lines(options.compare)
    for line in lines:
        calibration = job.calibration
        if not (options.calibration or options.no_calibration):  # each line's own device, not the one planned for
            calibration = find(str(line.get("device")))
        measured = calibration.link(int(line.get("world") or 1)) if calibration else None
        link = job.link if options.link or not measured else measured
        comparisons.append(compare_line(line, calibration, link))
    if options.json:
        print(json.dumps([dataclasses.asdict(one) for one in comparisons], indent=1))
        return EXIT_OK
    render.comparison_table(comparisons).print_to(console)
    for reason in [*skipped, *render.reasons(comparisons)]:
        console.print(reason, highlight=False, markup=False)
    return EXIT_OK


def as_json(job: Job, estimates: list[Estimate], advice: Advice, more: dict[str, Any]) -> dict[str, Any]:
    described = dataclasses.asdict(dataclasses.replace(job, calibration=None))
    return {
        "job": described | {"calibration": to_json(job.calibration) if job.calibration else None},
        "parameters": job.model.parameters(),
        "strategies": {found.strategy: estimate_json(job, found) for found in estimates},
        "advice": {"strategy": advice.strategy, "reason": advice.reason, "ruled_out": advice.ruled_out, "notes": advice.notes,
                   "micro_batch": advice.job.micro_batch, "recompute": advice.job.recompute,
                   "recompute_blocks": advice.job.recompute_blocks,
                   "faster": advice.faster and faster_json(advice.faster)},
        **more["figures"],
    }  # fmt: skip


def faster_json(faster: Faster) -> dict[str, Any]:
    return {"strategy": faster.strategy, "micro_batch": faster.job.micro_batch, "recompute": faster.job.recompute,
            "recompute_blocks": faster.job.recompute_blocks,
            "step_seconds": faster.step_seconds, "advised_step_seconds": faster.advised_seconds}  # fmt: skip


def estimate_json(job: Job, found: Estimate) -> dict[str, Any]:
    figures = dataclasses.asdict(found) | {"peak_bytes": found.peak_bytes}
    if not found.impossible:
        figures["largest_micro_batch"] = largest_micro_batch(job, found.layout, found.accumulate)
        figures["largest_model_parameters"] = largest_model_parameters(job, found.layout)
    return figures
