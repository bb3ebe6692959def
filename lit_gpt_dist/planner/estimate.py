"""One strategy's figures for a job: memory, traffic, step time, rate, efficiency, cost. Puts the formulas together.

A figure is None when something it needs is not known; nothing is guessed in its place.
"""

from dataclasses import dataclass

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.flops import flops_per_token, model_flops_utilization
from lit_gpt_dist.planner import compute, time
from lit_gpt_dist.planner.footprint import (
    Footprint,
    averages_after_backward,
    exchanges_as_computed,
    footprint,
    gradients_sent_bytes,
    strategy_widths,
)
from lit_gpt_dist.planner.job import Job
from lit_gpt_dist.planner.layout import NOT_TRAINABLE, SHARDED, Layout, layout
from lit_gpt_dist.planner.memory import state_bytes_per_parameter
from lit_gpt_dist.planner.traffic import communication_seconds, exposed_of, gathers_per_step, sent_bytes

# Over NVLink the collectives' kernels take processors, memory bandwidth and power from whatever runs beside them. On two H200s steps
# of four models became longer by all of their communication, 0.8 to 1.2 times (docs/plan.md); slower links were not measured.
HIDDEN_COST = 1.0


@dataclass(frozen=True)
class Times:
    """Seconds of one step; None where unknown.

    ``exposed``: communication that overlap does not hide; ``slowed``: what the hidden rest takes from compute all the same;
    ``serial_step``: with none hidden.
    """

    compute: float | None
    communication: float | None
    exposed: float | None
    step: float | None
    serial_step: float | None
    slowed: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """What `plan` says of one strategy. ``impossible``: why there is nothing to say."""

    strategy: str
    layout: Layout
    trainable: bool
    impossible: str = ""
    accumulate: int = 0
    footprint: Footprint | None = None
    fits: bool | None = None
    sent_bytes: float = 0.0  # by one card, per step
    sent_without_no_sync: float = 0.0
    times: Times | None = None
    tokens_per_second: float | None = None  # of all devices together
    mfu: float | None = None  # 6N + 12·L·h·s over the peak
    efficiency: float | None = None

    @property
    def peak_bytes(self) -> float | None:
        return self.footprint.peak_bytes if self.footprint else None


def estimate(job: Job, strategy: str) -> Estimate:
    plan = layout(job, strategy)
    trainable = strategy not in NOT_TRAINABLE
    if plan.impossible:
        return Estimate(strategy, plan, trainable, plan.impossible)
    try:
        accumulate = job.accumulate(plan.data_ranks)
    except UserError as error:
        return Estimate(strategy, plan, trainable, str(error))
    memory = footprint(job, plan, accumulate)
    fits = None if job.usable_bytes is None else memory.peak_bytes <= job.usable_bytes
    times = step_times(job, plan, accumulate)
    rate = job.tokens_per_step / times.step if times and times.step else None
    mfu = None
    if rate and job.device.peak_flops:
        mfu = model_flops_utilization(flops_per_token(job.model).palm, rate, job.device.peak_flops, plan.ranks)
    return Estimate(
        strategy,
        plan,
        trainable,
        accumulate=accumulate,
        footprint=memory,
        fits=fits,
        sent_bytes=sent_bytes(job, plan, accumulate, job.no_sync),
        sent_without_no_sync=sent_bytes(job, plan, accumulate, False),
        times=times,
        tokens_per_second=rate,
        mfu=mfu,
        efficiency=scaling_efficiency(job, plan, accumulate, times),
    )


def micro_compute_seconds(job: Job, plan: Layout) -> float | None:
    """Forward and backward of one micro-batch on one rank, or None when nothing about the device's speed is known."""
    width = strategy_widths(job, plan)
    divided = plan.tensor * plan.stages
    if rates := job.rates:
        parts = compute.micro_seconds(
            job.model, job.micro_batch, job.context, width, rates, job.execution, job.recompute, job.share_recomputed
        )
        return parts.total / divided
    if job.device.peak_flops is None or job.precision == "32-true":  # the peaks listed are of bf16
        return None
    flops, tokens = flops_per_token(job.model).palm, job.micro_batch * job.context
    timed = compute.assumed_micro_seconds(
        flops, tokens, job.device.peak_flops, job.mfu, job.recompute, job.share_recomputed
    )
    return timed / divided


def optimizer_step_seconds(job: Job, plan: Layout) -> float:
    """Only calibration gives it a time of its own; an assumed MFU is one of whole steps."""
    if (rates := job.rates) is None:
        return 0.0
    state = state_bytes_per_parameter(job.precision, job.optimizer)
    shard = job.model.parameters() / plan.optimizer_shards
    return compute.optimizer_seconds(shard, sum(state), state.weights, rates.copy_bandwidth)


def rank_seconds(job: Job, plan: Layout, accumulate: int) -> float | None:
    """All that one rank computes in a step: micro-batches, adding up their gradients, packing what is sent, the update; None where
    unknown."""
    micro = micro_compute_seconds(job, plan)
    if micro is None:
        return None
    adding_up = (accumulate - 1) * adding_up_seconds(job, plan)
    return accumulate * micro + adding_up + packing_seconds(job, plan, accumulate) + optimizer_step_seconds(job, plan)


def adding_up_seconds(job: Job, plan: Layout) -> float:
    """Of one micro-batch's gradients. Nothing under an assumed MFU, which is one of whole steps."""
    if (rates := job.rates) is None:
        return 0.0
    own = job.model.parameters() / (plan.tensor * plan.stages)
    gradients = own * state_bytes_per_parameter(job.precision, job.optimizer).gradients
    return compute.accumulation_seconds(gradients, rates.copy_bandwidth)


def packing_seconds(job: Job, plan: Layout, accumulate: int) -> float:
    """Of a step's gradients into the buffers that are reduced and, under FSDP2, of gathered weights out of theirs. Nothing under an
    assumed MFU, which is one of whole steps."""
    if (rates := job.rates) is None or plan.data_ranks == 1:
        return 0.0
    parameters = job.model.parameters() / (plan.tensor * plan.stages)
    width = state_bytes_per_parameter(job.precision, job.optimizer).gradients
    reductions = 1 if job.no_sync else accumulate
    if averages_after_backward(job, plan):
        sent_width = strategy_widths(job, plan).compute if exchanges_as_computed(job, plan, accumulate) else None
        return reductions * compute.averaging_seconds(parameters, width, sent_width, rates.copy_bandwidth)
    if plan.strategy not in SHARDED:
        return reductions * compute.bucket_seconds(parameters * width, job.model.layers, rates)
    own = strategy_widths(job, plan).compute
    unpacked = gathers_per_step(job, plan, accumulate) * 2 * own  # read and written
    sent = gradients_sent_bytes(job, plan, accumulate, job.no_sync)
    added = sent + width / plan.weight_shards if sent < width else 0.0  # what arrived is added up here, not on its way
    return parameters * (unpacked + reductions * (own + sent + added)) / rates.copy_bandwidth


def step_times(job: Job, plan: Layout, accumulate: int) -> Times | None:
    micro, own = micro_compute_seconds(job, plan), rank_seconds(job, plan, accumulate)
    if micro is None or own is None:
        return None
    if plan.stages > 1:
        own *= 1 + time.bubble_over_useful(plan.stages, accumulate)
    parts = communication_seconds(job, plan)
    if parts is None:
        return Times(own, None, None, None, None)
    total, exposed = exposed_of(job, plan, accumulate, micro, parts)
    slowed = slowed_seconds(job, total - exposed) if job.overlap else 0.0
    return Times(own, total, exposed, own + (exposed + slowed if job.overlap else total), own + total, slowed)


def slowed_seconds(job: Job, hidden: float) -> float:
    """What communication takes from the compute that it hides behind. Nothing under an assumed MFU, which is one of whole
    steps."""
    return HIDDEN_COST * hidden if job.slowest_link.is_fast and job.rates else 0.0


def scaling_efficiency(job: Job, plan: Layout, accumulate: int, times: Times | None) -> float | None:
    """Against one card with the same work per card: what communication and the bubble take."""
    if times is None or times.step is None:
        return None
    alone = rank_seconds(job, layout(job, "single"), accumulate)
    return None if alone is None else time.efficiency(alone / (plan.tensor * plan.stages), times.step)
