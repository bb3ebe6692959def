"""The largest micro-batch and the largest model that a card holds. Searches over the footprint; knows nothing of time."""

from lit_gpt_dist.planner.footprint import footprint
from lit_gpt_dist.planner.job import Job
from lit_gpt_dist.planner.layout import Layout
from lit_gpt_dist.planner.memory import state_bytes_per_parameter

LARGEST_MICRO_BATCH = 65_536  # windows; where the search stops


def peak_bytes(job: Job, plan: Layout, micro_batch: int, accumulate: int) -> float:
    return footprint(job.with_micro_batch(micro_batch), plan, accumulate).peak_bytes


def largest_micro_batch(job: Job, plan: Layout, accumulate: int = 1) -> int | None:
    """Windows per forward; 0 when not even one fits, None when the card's memory is not known."""
    if job.usable_bytes is None:
        return None
    low, high = 0, 1
    while high <= LARGEST_MICRO_BATCH and peak_bytes(job, plan, high, accumulate) <= job.usable_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if peak_bytes(job, plan, middle, accumulate) <= job.usable_bytes:
            low = middle
        else:
            high = middle
    return low


def largest_dividing_micro_batch(job: Job, plan: Layout) -> int | None:
    """The largest, up to the job's own, that divides the global batch over the data ranks and fits as it accumulates.

    0 when none does, None when the card's memory is not known.
    """
    if job.usable_bytes is None:
        return None
    per_rank, rest = divmod(job.global_batch, plan.data_ranks)
    dividing = [n for n in range(min(job.micro_batch, per_rank), 0, -1) if per_rank % n == 0 and not rest]
    return next((n for n in dividing if peak_bytes(job, plan, n, per_rank // n) <= job.usable_bytes), 0)


def largest_model_parameters(job: Job, plan: Layout, activation_share: float = 0.3) -> float | None:
    """Parameters whose state fills a card when ``activation_share`` of it stays free, or None for unknown memory."""
    if job.device.memory_bytes is None:
        return None
    state = state_bytes_per_parameter(job.precision, job.optimizer)
    each = (
        state.weights / plan.weight_shards
        + state.gradients / plan.gradient_shards
        + state.optimizer / plan.optimizer_shards
    )
    return (1 - activation_share) * job.device.memory_bytes / each
