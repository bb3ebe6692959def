"""The arithmetic of any figure, step by step, with the numbers in it. Recomputes nothing: prints what went in and came out."""

from collections.abc import Callable
from dataclasses import replace

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.flops import flops_per_token
from lit_gpt_dist.planner import activations, time
from lit_gpt_dist.planner.compute import recompute_factor
from lit_gpt_dist.planner.estimate import (
    HIDDEN_COST,
    Estimate,
    adding_up_seconds,
    micro_compute_seconds,
    optimizer_step_seconds,
    packing_seconds,
)
from lit_gpt_dist.planner.footprint import (
    KINDS,
    averages_after_backward,
    block_parameters,
    exchanges_as_computed,
    gathers_at_once,
    gradients_sent_bytes,
    root_parameters,
    strategy_widths,
)
from lit_gpt_dist.planner.hardware import GIB, MIB
from lit_gpt_dist.planner.job import Job
from lit_gpt_dist.planner.layout import SHARDED
from lit_gpt_dist.planner.limits import largest_micro_batch
from lit_gpt_dist.planner.memory import state_bytes_per_parameter
from lit_gpt_dist.planner.traffic import (
    CommunicationParts,
    communication_seconds,
    exposed_of,
    gathers_per_step,
    last_bucket_bytes,
)


def explain(job: Job, found: Estimate, figure: str) -> list[str]:
    """Lines of arithmetic for one of ``FIGURES``.

    Raises:
        UserError: no such figure, or the strategy is impossible here.
    """
    if figure not in FIGURES:
        raise UserError(f"figure {figure!r} is not one of {', '.join(FIGURES)}")
    if found.impossible:
        raise UserError(f"{found.strategy} has no figures here: {found.impossible}; choose another --strategy")
    return [f"{figure} under {found.strategy}"] + ["  " + line for line in FIGURES[figure](job, found)]


def state(kind: str) -> Callable[[Job, Estimate], list[str]]:
    def lines(job: Job, found: Estimate) -> list[str]:
        assert found.footprint
        each = getattr(state_bytes_per_parameter(job.precision, job.optimizer), kind)
        shards = getattr(
            found.layout, {"weights": "weight_shards", "gradients": "gradient_shards"}.get(kind, "optimizer_shards")
        )
        parameters, result = job.model.parameters(), found.footprint.kinds[kind]
        text = [f"Ψ = {parameters:,} parameters × {each:g} bytes ({job.precision}, {job.optimizer}) / {shards} shards"]
        text.append(f"  = {parameters * each / shards / GIB:.3f} GiB")
        text.append(f"at the peak ({found.footprint.moment}), accumulate {found.accumulate}: {result / GIB:.3f} GiB")
        if kind == "gradients" and result == 0:
            text.append("(freed by zero_grad; they are made while backward frees activations)")
        return text

    return lines


def copies(job: Job, found: Estimate) -> list[str]:
    assert found.footprint
    width = strategy_widths(job, found.layout).compute
    if gathers_at_once(job, found.layout):
        text = f"{width} bytes × all {job.model.parameters():,} parameters, gathered at once"
    elif found.strategy in SHARDED:
        root, block = root_parameters(job.model), block_parameters(job.model)
        text = f"{width} bytes × (root {root:,.0f} + gathered blocks of {block:,.0f} parameters)"
    else:
        text = f"16-bit copies of {job.model.matmul_parameters():,} matmul weights, where alive: {width} bytes each"
    return [text, f"at the peak ({found.footprint.moment}): {found.footprint.kinds['copies'] / GIB:.3f} GiB"]


def activation_lines(job: Job, found: Estimate) -> list[str]:
    assert found.footprint
    width, model = strategy_widths(job, found.layout), job.model
    layer = activations.layer_saved_bytes(model, job.context, width, job.flash)
    attention = activations.attention_saved_bytes(model, job.context, width, job.flash)
    kept = activations.layer_kept_bytes(model, job.context, width, job.flash, job.recompute)
    tokens, again = job.micro_batch * job.context, job.blocks_recomputed
    lines = [
        f"compute values {width.compute} bytes, residual stream {width.residual} bytes; h = {model.width}, f = {model.ff_width}",
        f"a layer saves {layer:,.0f} bytes a token ({layer / model.width:.2f}·h): attention {attention:,.0f}, "
        f"feed-forward {activations.feed_forward_saved_bytes(model, width):,.0f}",
    ]
    if job.recompute != "none":
        left = "products" if model.dropout > 0 else "products and attention"
        what = "its input only" if job.recompute == "full" else f"its input and what {left} left"
        which = "a block" if job.recompute_blocks is None else f"each of the first {again} of {model.layers} blocks"
        lines.append(f"recomputed: {which} keeps {what}, {kept:,.0f} bytes a token")
    ends = activations.ends_saved_bytes(model, width)
    parts = [(again, kept), (model.layers - again, layer)]
    blocks = " + ".join(f"{count} layers × {size:,.0f}" for count, size in parts if count)
    lines.append(f"tokens {job.micro_batch} × {job.context} = {tokens:,}; × ({blocks} + ends {ends:,.0f})")
    lines.append(f"  = {tokens * (sum(count * size for count, size in parts) + ends) / GIB:.3f} GiB")
    lines.append(f"at the peak ({found.footprint.moment}): {found.footprint.kinds['activations'] / GIB:.3f} GiB")
    return lines


def logits(job: Job, found: Estimate) -> list[str]:
    assert found.footprint
    compiled, width = job.execution != "eager", strategy_widths(job, found.layout)
    each = activations.logit_bytes(width, compiled, job.autocast)
    why = "read off measurements" if compiled else "log-probabilities and two gradients, fp32"
    total = job.micro_batch * job.context * job.model.vocab_size * each
    return [
        f"{job.micro_batch} × {job.context} tokens × {job.model.vocab_size:,} logits × {each} bytes ({why})",
        f"  = {total / GIB:.3f} GiB, over {found.layout.tensor} tensor ranks",
        f"at the peak ({found.footprint.moment}): {found.footprint.kinds['logits'] / GIB:.3f} GiB",
    ]


def peak(job: Job, found: Estimate) -> list[str]:
    assert found.footprint
    parts = [f"{kind} {found.footprint.kinds[kind] / GIB:.3f}" for kind in KINDS if found.footprint.kinds[kind]]
    moments = ", ".join(f"{name} {total / GIB:.2f}" for name, total in found.footprint.totals.items())
    lines = [" + ".join(parts), f"  = {found.footprint.peak_bytes / GIB:.2f} GiB", f"moments of a step, GiB: {moments}"]
    if job.usable_bytes is not None:
        lines.append(f"usable {job.usable_bytes / GIB:.1f} GiB: {'fits' if found.fits else 'does not fit'}")
    return lines


def sent(job: Job, found: Estimate) -> list[str]:
    gradient = state_bytes_per_parameter(job.precision, job.optimizer).gradients
    width, ranks = strategy_widths(job, found.layout).compute, found.layout.data_ranks
    parameters = job.model.parameters() / (found.layout.tensor * found.layout.stages)
    if found.strategy in SHARDED:
        shards = found.layout.weight_shards
        gathers = f"2 gathers × {width} bytes × {found.accumulate} micro-batches"
        if gathers_per_step(job, found.layout, found.accumulate) == 1:
            gathers = f"1 gather × {width} bytes"
        reductions = 1 if job.no_sync else found.accumulate
        reduced = gradients_sent_bytes(job, found.layout, found.accumulate, job.no_sync)
        formula = (
            f"({shards} − 1)/{shards} × {parameters:,.0f} × ({gathers} + {reduced:g} bytes × {reductions} reductions)"
        )
        if (groups := ranks // shards) > 1:
            formula += f" + 2·({groups} − 1)/{groups} × {parameters / shards:,.0f} × {gradient:g} bytes × {reductions} across groups"
    elif exchanges_as_computed(job, found.layout, found.accumulate):
        formula = f"{parameters:,.0f} × {width:g} bytes, to the only other card"
    else:
        formula = f"2·({ranks} − 1)/{ranks} × {parameters:,.0f} × {gradient:g} bytes"
        formula += "" if job.no_sync else f" × {found.accumulate} micro-batches"
    if found.layout.tensor * found.layout.stages > 1:
        formula += " + what layers or stages exchange"
    return [formula, f"  = {found.sent_bytes / 1e9:.3f} GB a card and step",
            f"without no_sync: {found.sent_without_no_sync / 1e9:.3f} GB"]  # fmt: skip


def compute_lines(job: Job, found: Estimate) -> list[str]:
    micro = micro_compute_seconds(job, found.layout)
    if micro is None or found.times is None or found.times.compute is None:
        return [f"unknown: no bf16 peak is listed for {job.device.name} in {job.precision}, and no calibration matches"]
    flops, tokens = flops_per_token(job.model), job.micro_batch * job.context
    lines = [f"model FLOPs a token: 6N + 12·L·h·s = {flops.six_n:,} + {flops.palm - flops.six_n:,} = {flops.palm:,}"]
    if job.calibration and job.rates:
        lines.append(
            f"calibrated on {job.calibration.device}, {job.calibration.when} (products, attention, traffic, launches)"
        )
    else:
        assert job.device.peak_flops
        factor = recompute_factor(job.share_recomputed)
        extra = f" × {factor:.2f} (recomputation)" if job.recompute == "full" else ""
        lines.append(
            f"{flops.palm:,} × {tokens:,} tokens / ({job.device.peak_flops:.3g} × assumed MFU {job.mfu:g}){extra}"
        )
    lines.append(f"  = {micro * 1e3:.2f} ms a micro-batch; × accumulate {found.accumulate}")
    if job.rates:
        adding = f"{found.accumulate - 1} × {adding_up_seconds(job, found.layout) * 1e3:.2f} ms (gradients read twice, written once)"
        packing = packing_seconds(job, found.layout, found.accumulate) * 1e3
        update = optimizer_step_seconds(job, found.layout) * 1e3
        lines.append(
            f"adding up: {adding}; into and out of what is sent: {packing:.2f} ms; the update: {update:.2f} ms"
        )
    lines.append(f"  = {found.times.compute * 1e3:.2f} ms a step")
    return lines


def communication_lines(job: Job, found: Estimate) -> list[str]:
    parts = communication_seconds(job, found.layout)
    if parts is None or found.times is None or found.times.communication is None or found.times.exposed is None:
        return ["unknown: the link or the compute time is not known; give --link (and --node_link for several nodes)"]
    micro = micro_compute_seconds(job, found.layout) or 0.0
    bandwidth = job.slowest_link.bandwidth or 0.0
    ideal = replace(parts, first_gather=0.0, last_step=0.0, last_reduce=0.0)
    _, ideally_exposed = exposed_of(job, found.layout, found.accumulate, micro, ideal)
    how = (
        ", the larger of what backward (a gather: forward) is too short for and what is never hidden; "
        f"{ideally_exposed * 1e3:.2f} ms if all could overlap"
    )
    behind = time.BACKWARD_SHARE * micro * 1e3
    hidden = [f"hidden behind backward: up to {time.BACKWARD_SHARE:.2f} × {micro * 1e3:.2f} ms = {behind:.2f} ms"]
    if gathers_at_once(job, found.layout) or averages_after_backward(job, found.layout):
        how, hidden = "", []
    if found.layout.data_ranks == 1:
        how = ""
    return [
        f"link {job.slowest_link.name}, {bandwidth / 1e9:.1f} GB/s ({job.slowest_link.source})",
        f"once a step {parts.step * 1e3:.2f} ms; a micro-batch: gather {parts.gather * 1e3:.2f}, reduction {parts.reduce * 1e3:.2f}, "
        f"in the way {parts.blocking * 1e3:.2f} ms",
        f"all of it: {found.times.communication * 1e3:.2f} ms",
        *hidden,
        *never_hidden(job, found, parts),
        f"exposed: {found.times.exposed * 1e3:.2f} ms{how}",
        *slowed_lines(found),
    ]


def slowed_lines(found: Estimate) -> list[str]:
    """What is hidden on a fast link is not free."""
    if found.times is None or not found.times.slowed:
        return []
    return [
        f"the rest runs beside compute and takes {HIDDEN_COST:g} × its own time from it (processors, power): {found.times.slowed * 1e3:.2f} ms"
    ]


def never_hidden(job: Job, found: Estimate, parts: CommunicationParts) -> list[str]:
    """What starts when there is nothing left to compute, or must end before anything can be."""
    if found.layout.data_ranks == 1:
        return []
    if gathers_at_once(job, found.layout):
        return [
            f"never hidden: all of it, gathered at once ({parts.gather * 1e3:.2f} ms) and reduced when backward has ended"
        ]
    if found.strategy in SHARDED:
        root, block = root_parameters(job.model), block_parameters(job.model)
        lines = [
            f"never hidden: the first gathers, root {root:,.0f} and a block {block:,.0f} parameters: {parts.first_gather * 1e3:.2f} ms a micro-batch",
            f"never hidden: the last reduction, the root's: {parts.last_reduce * 1e3:.2f} ms",
        ]
        return lines + [f"  and its all-reduce across nodes: {parts.last_step * 1e3:.2f} ms"] * (
            found.strategy == "hsdp"
        )
    if averages_after_backward(job, found.layout):
        return [f"never hidden: all of it, averaged when backward has ended: {parts.step * 1e3:.2f} ms"]
    size, last = last_bucket_bytes(job, found.layout), parts.last_step
    if found.strategy == "zero2":
        last = last / 2
    lines = [
        f"never hidden: the last bucket, {size / MIB:,.1f} MiB (the first-used parameters: a bucket of {job.bucket / MIB:g} MiB or the "
        f"token embedding, at most all gradients): {last * 1e3:.2f} ms"
    ]
    if found.strategy == "zero2":
        lines.append(f"never hidden: the gather of the new weights: {parts.step / 2 * 1e3:.2f} ms")
    return lines


def step(job: Job, found: Estimate) -> list[str]:
    lines = compute_lines(job, found) + communication_lines(job, found)
    if found.times and found.times.step and found.times.serial_step:
        lines.append(
            f"step with overlap {found.times.step * 1e3:.2f} ms, without {found.times.serial_step * 1e3:.2f} ms"
        )
    return lines


def rate(job: Job, found: Estimate) -> list[str]:
    if found.tokens_per_second is None or found.times is None or not found.times.step:
        return step(job, found)
    text = f"{job.global_batch} windows × {job.context} tokens / {found.times.step * 1e3:.2f} ms = {found.tokens_per_second:,.0f} tokens/s"
    if found.mfu is None or job.device.peak_flops is None:
        return [text, "MFU: unknown without a peak"]
    palm, devices = flops_per_token(job.model).palm, found.layout.ranks
    return [text, f"MFU (6N + 12·L·h·s) = {palm:,} × {found.tokens_per_second:,.0f} / ({job.device.peak_flops:.4g} × {devices})",
            f"  = {found.mfu:.1%}"]  # fmt: skip


def micro_batch(job: Job, found: Estimate) -> list[str]:
    largest = largest_micro_batch(job, found.layout, found.accumulate)
    if largest is None:
        return [f"unknown: the memory of {job.device.name} is not known"]
    return [f"the largest micro-batch whose peak stays within {(job.usable_bytes or 0) / GIB:.1f} GiB: {largest}"]


FIGURES: dict[str, Callable[[Job, Estimate], list[str]]] = {
    "weights": state("weights"),
    "gradients": state("gradients"),
    "optimizer": state("optimizer"),
    "copies": copies,
    "activations": activation_lines,
    "logits": logits,
    "peak": peak,
    "sent": sent,
    "compute": compute_lines,
    "communication": communication_lines,
    "step": step,
    "rate": rate,
    "micro_batch": micro_batch,
}
