"""Findings and measurements as tables. Formats numbers; measures none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_gpt_dist.doctor.check import Check, Light

if TYPE_CHECKING:  # torch only where something is measured
    from lit_gpt_dist.doctor.collectives import Timing
    from lit_gpt_dist.doctor.measure import Measured

MARK = {Light.GREEN: "ok", Light.YELLOW: "look", Light.RED: "FAIL", Light.UNKNOWN: "?"}


def checks_table(checks: Iterable[Check]) -> Table:
    table = Table(show_lines=False)
    table.add_column("", no_wrap=True)
    for name in ("what", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for check in checks:
        mark = f"[{check.light.value}]{MARK[check.light]}[/]"
        table.add_row(mark, escape(check.name), escape(check.found), escape(check.advice))
    return table


def sweep_table(timings: Iterable[Timing]) -> Table:
    table = Table(title="Collectives (algbw and busbw as nccl-tests defines them)", title_justify="left")
    for name in ("backend", "ranks", "collective", "larger buffer, MB", "ms", "algbw GB/s", "busbw GB/s"):
        table.add_column(name, justify="left" if name in ("backend", "collective") else "right")
    for one in timings:
        size = f"{one.size_bytes / 1e6:,.2f}"
        if one.seconds is None or one.algbw is None or one.busbw is None:
            table.add_row(one.backend, str(one.ranks), one.collective, size, escape(one.error), "", "")
            continue
        figures = (f"{one.seconds * 1e3:.3f}", f"{one.algbw / 1e9:.2f}", f"{one.busbw / 1e9:.2f}")
        table.add_row(one.backend, str(one.ranks), one.collective, size, *figures)
    return table


def flops(rate: float) -> str:
    """TFLOP/s, or GFLOP/s where that would round to nothing."""
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def rate_lines(measured: Measured) -> list[str]:
    rates, kind = measured.calibration.rates, measured.calibration.precision
    lines = [f"measured on {measured.calibration.device}"]
    if rates:
        products = ", ".join(f"{width:.0f}: {flops(rate)}" for width, rate in rates.matmul)
        lines += [
            f"{kind} products of a layer by width: {products}",
            f"attention, forward and backward: {flops(rates.attention_flops)}",
            f"copy on the device (read + write): {rates.copy_bandwidth / 1e9:,.0f} GB/s",
            f"host time of an eager operation {rates.launch_seconds * 1e6:.1f} µs, device time of an empty kernel {rates.kernel_seconds * 1e6:.2f} µs",
        ]
    if measured.square_flops:
        lines.append(f"one square {kind} product: {flops(measured.square_flops)}")
    if measured.calibration.host_to_device:
        lines.append(f"pinned host memory to device: {measured.calibration.host_to_device / 1e9:.1f} GB/s")
    return lines


def identity_lines(measured: Measured) -> list[str]:
    """All-reduce = reduce-scatter + all-gather: in values once, in time at each size."""
    lines = []
    for sweep in measured.sweeps:
        identity = sweep.identity
        what = f"{identity.backend}, {identity.ranks} ranks: all-reduce = reduce-scatter + all-gather"
        if identity.relative_difference is None:
            lines.append(f"{what}: not shown, reduce-scatter is not supported by {identity.backend}")
        else:
            lines.append(f"{what} in values, to {identity.relative_difference:.1e} of the largest")
        lines += [f"  in time: {line}" for line in time_identity(sweep.timings)]
    return lines


def time_identity(timings: Iterable[Timing]) -> list[str]:
    seconds = {(one.collective, one.size_bytes): one.seconds for one in timings if one.seconds is not None}
    lines = []
    for (name, size), whole in seconds.items():
        scatter, gather = seconds.get(("reduce_scatter", size)), seconds.get(("all_gather", size))
        if name == "all_reduce" and scatter and gather:
            lines.append(
                f"{size / 1e6:,.2f} MB: {whole * 1e3:.3f} ms against {scatter * 1e3:.3f} + {gather * 1e3:.3f} "
                f"= {(scatter + gather) * 1e3:.3f} ms ({whole / (scatter + gather):.0%})"
            )
    return lines


def print_measured(console: Console, measured: Measured) -> None:
    for line in rate_lines(measured):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if measured.timings:
        console.print(sweep_table(measured.timings))
    for line in identity_lines(measured):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
