"""What one rank sends in a step under a strategy, how long that takes, and what of it overlap leaves exposed.

Some pieces can never be hidden, because nothing is left to compute beside them:

* DDP reduces its last bucket when backward has ended. It holds the parameters used first, so the token embedding's whole
  gradient (a bucket takes whole parameters), and has at least ``Job.bucket`` where there is as much;
* DDP without overlap averages all of them then;
* FSDP2 gathers the root unit (embeddings, head, final norm) and the first block before anything computes;
* FSDP2 reduce-scatters the root unit, whose embedding is used first, when backward has ended;
* as one unit, it gathers before and reduce-scatters after everything.
"""

from dataclasses import dataclass

from lit_gpt_dist.planner import communication as comm
from lit_gpt_dist.planner import time
from lit_gpt_dist.planner.footprint import (
    averages_after_backward,
    block_parameters,
    exchanges_as_computed,
    gathers_at_once,
    gradients_sent_bytes,
    root_parameters,
    strategy_widths,
)
from lit_gpt_dist.planner.job import Job
from lit_gpt_dist.planner.layout import SHARDED, Layout
from lit_gpt_dist.planner.memory import state_bytes_per_parameter


@dataclass(frozen=True)
class CommunicationParts:
    """Seconds: what happens once a step, and per micro-batch one gather, one reduction, and what cannot overlap.

    ``first_gather`` and the two ``last`` are the pieces of ``gather``, ``step`` and ``reduce`` that no compute can hide.
    """

    step: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    blocking: float = 0.0
    first_gather: float = 0.0
    last_step: float = 0.0
    last_reduce: float = 0.0


def communication_seconds(job: Job, plan: Layout) -> CommunicationParts | None:
    """None when the link that is needed is not known."""
    if plan.ranks == 1:
        return CommunicationParts()
    gradient = state_bytes_per_parameter(job.precision, job.optimizer).gradients
    parameters = job.model.parameters() / (plan.tensor * plan.stages)
    pieces = 1 if gathers_at_once(job, plan) else job.model.layers
    unit = parameters / pieces * strategy_widths(job, plan).compute
    inside, across = job.link.bandwidth_at(unit), job.slowest_link.bandwidth_at(job.bucket)
    if across is None or inside is None:
        return None
    if plan.strategy in SHARDED:
        link = job.link if plan.strategy == "hsdp" else job.slowest_link
        within = link.gather_bandwidth_at(unit) or across
        return sharded_seconds(job, plan, within, across)
    replicated = comm.all_reduce_seconds(parameters * gradient, plan.data_ranks, across)
    last = replicated * last_bucket_bytes(job, plan) / (parameters * gradient)
    if averages_after_backward(job, plan):
        sent = sent_bytes(job, plan, job.accumulate(plan.data_ranks), no_sync=True)
        last = replicated = sent / (job.slowest_link.gather_bandwidth_at(sent) or across)
    blocking = 0.0
    if plan.tensor > 1:
        sent = comm.tensor_parallel_bytes(job.micro_batch, job.context, job.model.width, job.model.layers)
        bandwidth = job.link.bandwidth_at(sent / (4 * job.model.layers)) or inside
        blocking = comm.all_reduce_seconds(sent, plan.tensor, bandwidth)
    elif plan.stages > 1:
        blocking = comm.pipeline_bytes(job.micro_batch, job.context, job.model.width) / across
    return CommunicationParts(replicated, blocking=blocking, last_step=last)


def last_bucket_bytes(job: Job, plan: Layout) -> float:
    """Gradients that DDP reduces after backward: a bucket, or the token embedding where that is more; at most all of them."""
    gradient = state_bytes_per_parameter(job.precision, job.optimizer).gradients
    embedding = gradient * job.model.vocab_size * job.model.width / plan.tensor
    return min(max(job.bucket, embedding), gradient * job.model.parameters() / (plan.tensor * plan.stages))


def sharded_seconds(job: Job, plan: Layout, within: float, across: float) -> CommunicationParts:
    """FSDP2's gathers and reductions over the shards (``within``, bytes/s) and HSDP's all-reduce over the replicas (``across``)."""
    gradient = state_bytes_per_parameter(job.precision, job.optimizer).gradients
    parameters, ranks = job.model.parameters(), plan.weight_shards
    gather = comm.all_gather_seconds(parameters * strategy_widths(job, plan).compute, ranks, within)
    sent = gradients_sent_bytes(job, plan, job.accumulate(plan.data_ranks), job.no_sync)
    reduce = comm.reduce_scatter_seconds(parameters * sent, ranks, within)  # an all-to-all sends as much
    step = comm.all_reduce_seconds(parameters * gradient / ranks, plan.data_ranks // ranks, across)
    if gathers_at_once(job, plan):  # then nothing is left to compute beside it
        return CommunicationParts(step, gather, reduce, first_gather=gather, last_step=step, last_reduce=reduce)
    root = root_parameters(job.model) / parameters
    first = root + block_parameters(job.model) / parameters
    return CommunicationParts(
        step, gather, reduce, first_gather=first * gather, last_step=root * step, last_reduce=root * reduce
    )


def exposed_of(job: Job, plan: Layout, accumulate: int, micro: float, parts: CommunicationParts) -> tuple[float, float]:
    """All communication of a step and what overlap leaves exposed, in seconds."""
    reductions = 1 if job.no_sync else accumulate
    backward = time.BACKWARD_SHARE * micro
    once = time.exposed_seconds(parts.step, backward, parts.last_step)
    if plan.strategy in SHARDED:
        gathers = gathers_per_step(job, plan, accumulate)
        total = gathers * parts.gather + reductions * (parts.reduce + parts.step)
        return total, reductions * once + sum(
            sharded_exposed(micro, parts, _gathers_of(i, gathers, accumulate), reductions == accumulate or i == 0)
            for i in range(accumulate)
        )
    if plan.strategy == "zero2":
        # gradients live in shards, so each micro-batch scatters; the weights are gathered once
        half = parts.step / 2
        exposed = accumulate * time.exposed_seconds(half, backward, parts.last_step / 2) + half
        return (accumulate + 1) * half, exposed
    total = reductions * parts.step + accumulate * parts.blocking
    return total, reductions * once + accumulate * parts.blocking


def gathers_per_step(job: Job, plan: Layout, accumulate: int) -> int:
    """Of the weights under FSDP2: for each forward and backward, or once where they are kept for the step."""
    return 2 * accumulate if job.reshard_after_forward and not gathers_at_once(job, plan) else 1


def _gathers_of(index: int, gathers: int, accumulate: int) -> int:
    """Of a step's ``gathers``, those of one micro-batch: all have as many, or the first has the only one."""
    return gathers // accumulate if gathers >= accumulate else int(index == 0)


def sharded_exposed(micro: float, parts: CommunicationParts, gathers: int, reduces: bool) -> float:
    """Of one micro-batch under FSDP2, with 0, 1 or 2 gathers, which reduces or does not."""
    return time.fsdp_exposed_seconds(
        micro,
        parts.gather if gathers else 0.0,
        parts.reduce if reduces else 0.0,
        gathers,
        parts.first_gather if gathers else 0.0,
        parts.last_reduce if reduces else 0.0,
    )


def sent_bytes(job: Job, plan: Layout, accumulate: int, no_sync: bool) -> float:
    """Bytes one card sends per step."""
    gradient = state_bytes_per_parameter(job.precision, job.optimizer).gradients
    parameters = job.model.parameters() / (plan.tensor * plan.stages)
    if plan.strategy in SHARDED:
        width, shards = strategy_widths(job, plan).compute, plan.weight_shards
        gathers = gathers_per_step(job, plan, accumulate) / accumulate
        reduced = gradients_sent_bytes(job, plan, accumulate, no_sync)
        sharded = comm.fsdp_bytes(parameters, shards, width, reduced, accumulate, no_sync, gathers)
        return sharded + comm.ddp_bytes(parameters / shards, plan.data_ranks // shards, gradient, accumulate, no_sync)
    if plan.strategy == "zero2":
        return comm.ddp_bytes(parameters, plan.data_ranks, gradient) * (accumulate + 1) / 2
    if exchanges_as_computed(job, plan, accumulate):
        return parameters * strategy_widths(job, plan).compute  # all of its own, to the only other
    sent = comm.ddp_bytes(parameters, plan.data_ranks, gradient, accumulate, no_sync)
    if plan.tensor > 1:
        buffers = comm.tensor_parallel_bytes(job.micro_batch, job.context, job.model.width, job.model.layers)
        sent += accumulate * 2 * comm.share(plan.tensor) * buffers
    if plan.stages > 1:
        sent += accumulate * comm.pipeline_bytes(job.micro_batch, job.context, job.model.width)
    return sent
