"""One strategy's figures for a job: memory, traffic, step time, rate, efficiency, cost. Puts the formulas together.

A figure is None when something it needs is not known; nothing is guessed in its place.
"""

from dataclasses import dataclass

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.flops import flops_per_token, model_flops_utilization
from lit_gpt_dist.planner import communication as comm
from lit_gpt_dist.planner import compute, time
from lit_gpt_dist.planner.footprint import Footprint, footprint, strategy_widths
from lit_gpt_dist.planner.job import Job
from lit_gpt_dist.planner.layout import NOT_TRAINABLE, Layout, layout
from lit_gpt_dist.planner.memory import state_bytes_per_parameter

DDP_BUCKET_BYTES = 25 * 2**20  # torch.nn.parallel.DistributedDataParallel's default bucket_cap_mb


@dataclass(frozen=True)
class Times:
    """Seconds of one step; None where unknown. ``exposed``: what overlap does not hide; ``serial``: all of it, as without overlap."""

    compute: float | None
    communication: float | None
    exposed: float | None
    step: float | None
    serial_step: float | None


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
        timed = compute.micro_seconds(
            job.model, job.micro_batch, job.context, width, rates, job.execution, job.recompute
        )
        return timed.total / divided
    if job.device.peak_flops is None or job.precision == "32-true":  # the peaks listed are of bf16
        return None
    flops, tokens = flops_per_token(job.model).palm, job.micro_batch * job.context
    return compute.assumed_micro_seconds(flops, tokens, job.device.peak_flops, job.mfu, job.recompute) / divided


def optimizer_step_seconds(job: Job, plan: Layout) -> float:
    """Only calibration gives it a time of its own; an assumed MFU is one of whole steps."""
    if (rates := job.rates) is None:
        return 0.0
    state = state_bytes_per_parameter(job.precision, job.optimizer)
    shard = job.model.parameters() / plan.optimizer_shards
    return compute.optimizer_seconds(shard, sum(state), state.weights, rates.copy_bandwidth)


def step_times(job: Job, plan: Layout, accumulate: int) -> Times | None:
    micro = micro_compute_seconds(job, plan)
    if micro is None:
        return None
    own = accumulate * micro + optimizer_step_seconds(job, plan)
    if plan.stages > 1:
        own *= 1 + time.bubble_over_useful(plan.stages, accumulate)
    parts = communication_seconds(job, plan, accumulate)
    if parts is None:
        return Times(own, None, None, None, None)
    total, exposed = exposed_of(job, plan, accumulate, micro, parts)
    return Times(own, total, exposed, own + (exposed if job.overlap else total), own + total)


@dataclass(frozen=True)
class CommunicationParts:
    """Seconds: what happens once a step, and per micro-batch one gather, one reduction, and what cannot overlap."""

    step: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    blocking: float = 0.0


def communication_seconds(job: Job, plan: Layout, accumulate: int) -> CommunicationParts | None:
    """None when the link that is needed is not known."""
    if plan.ranks == 1:
        return CommunicationParts()
    gradient = state_bytes_per_parameter(job.precision, job.optimizer).gradients
    parameters = job.model.parameters() / (plan.tensor * plan.stages)
    unit = parameters / job.model.layers * strategy_widths(job, plan).compute
    inside, across = job.link.bandwidth_at(unit), job.slowest_link.bandwidth_at(DDP_BUCKET_BYTES)
    if across is None or inside is None:
        return None
    if plan.strategy in ("fsdp2", "hsdp"):
        ranks, width = plan.weight_shards, strategy_widths(job, plan).compute
        within = inside if plan.strategy == "hsdp" else job.slowest_link.bandwidth_at(unit) or across
        gather = comm.all_gather_seconds(parameters * width, ranks, within)
        reduce = comm.reduce_scatter_seconds(parameters * gradient, ranks, within)
        replicas = plan.data_ranks // plan.weight_shards
        return CommunicationParts(
            comm.all_reduce_seconds(parameters * gradient / ranks, replicas, across), gather, reduce
        )
    replicated = comm.all_reduce_seconds(parameters * gradient, plan.data_ranks, across)
    if plan.tensor > 1:
        sent = comm.tensor_parallel_bytes(job.micro_batch, job.context, job.model.width, job.model.layers)
        bandwidth = job.link.bandwidth_at(sent / (4 * job.model.layers)) or inside
        return CommunicationParts(replicated, blocking=comm.all_reduce_seconds(sent, plan.tensor, bandwidth))
    if plan.stages > 1:
        return CommunicationParts(
            replicated, blocking=comm.pipeline_bytes(job.micro_batch, job.context, job.model.width) / across
        )
    return CommunicationParts(replicated)


def exposed_of(job: Job, plan: Layout, accumulate: int, micro: float, parts: CommunicationParts) -> tuple[float, float]:
    """All communication of a step and what overlap leaves exposed, in seconds."""
    reductions = 1 if job.no_sync else accumulate
    backward = time.BACKWARD_SHARE * micro
    if plan.strategy in ("fsdp2", "hsdp"):
        gathers = 2 if job.reshard_after_forward else 1
        total = accumulate * gathers * parts.gather + reductions * parts.reduce + parts.step
        reducing = time.fsdp_exposed_seconds(micro, parts.gather, parts.reduce, gathers)
        gathering = time.fsdp_exposed_seconds(micro, parts.gather, 0.0, gathers)
        exposed = reductions * reducing + (accumulate - reductions) * gathering
        return total, exposed + time.exposed_seconds(parts.step, backward)
    if (
        plan.strategy == "zero2"
    ):  # gradients live in shards, so each micro-batch scatters; the weights are gathered once
        half = parts.step / 2
        exposed = accumulate * time.exposed_seconds(half, backward) + half
        return (accumulate + 1) * half, exposed
    total = reductions * parts.step + accumulate * parts.blocking
    return total, reductions * time.exposed_seconds(parts.step, backward) + accumulate * parts.blocking


def sent_bytes(job: Job, plan: Layout, accumulate: int, no_sync: bool) -> float:
    """Bytes one card sends per step."""
    gradient = state_bytes_per_parameter(job.precision, job.optimizer).gradients
    parameters = job.model.parameters() / (plan.tensor * plan.stages)
    if plan.strategy in ("fsdp2", "hsdp"):
        width, shards = strategy_widths(job, plan).compute, plan.weight_shards
        gathers = 2 if job.reshard_after_forward else 1
        sharded = comm.fsdp_bytes(parameters, shards, width, gradient, accumulate, no_sync, gathers)
        return sharded + comm.ddp_bytes(parameters / shards, plan.data_ranks // shards, gradient, accumulate, no_sync)
    if plan.strategy == "zero2":
        return comm.ddp_bytes(parameters, plan.data_ranks, gradient) * (accumulate + 1) / 2
    sent = comm.ddp_bytes(parameters, plan.data_ranks, gradient, accumulate, no_sync)
    if plan.tensor > 1:
        buffers = comm.tensor_parallel_bytes(job.micro_batch, job.context, job.model.width, job.model.layers)
        sent += accumulate * 2 * comm.share(plan.tensor) * buffers
    if plan.stages > 1:
        sent += accumulate * comm.pipeline_bytes(job.micro_batch, job.context, job.model.width)
    return sent


def scaling_efficiency(job: Job, plan: Layout, accumulate: int, times: Times | None) -> float | None:
    """Against one card with the same work per card: what communication and the bubble take."""
    if times is None or times.step is None:
        return None
    single = micro_compute_seconds(job, layout(job, "single"))
    if single is None:
        return None
    alone = accumulate * single / (plan.tensor * plan.stages) + optimizer_step_seconds(job, layout(job, "single")) / (
        plan.tensor * plan.stages
    )
    return time.efficiency(alone, times.step)
