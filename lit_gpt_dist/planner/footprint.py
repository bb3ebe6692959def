"""Peak memory of one rank under a strategy, by kind. Bytes from counted tensors; knows nothing of time.

A step has three moments that can be the peak:

* *loss*: the forward of a micro-batch has ended, every kept activation and the logits are alive;
* *backward*: logits are gone, the last block is whole (again, if it is recomputed) and gradients pass through it;
* *end*: backward reaches the first block, every gradient exists.

Gradients before the end: none for a single card without accumulation (they are freed by ``zero_grad``); all of
them when accumulating, and always in DDP's buckets, which stay (gradients are views of the buckets: no second copy).
FSDP2 without reducing every micro-batch keeps whole, unsharded gradients in the reduction's type.
"""

from dataclasses import dataclass

from lit_gpt_dist.model.config import GPTConfig
from lit_gpt_dist.planner.activations import (
    FP32_BYTES,
    TOKEN_BYTES,
    Widths,
    computed_again_bytes,
    ends_saved_bytes,
    layer_kept_bytes,
    layer_saved_bytes,
    logit_bytes,
)
from lit_gpt_dist.planner.activations import widths as value_widths
from lit_gpt_dist.planner.job import AT_ONCE_SHARE, PIECE_ELEMENTS, Job
from lit_gpt_dist.planner.layout import SHARDED, Layout
from lit_gpt_dist.planner.memory import state_bytes_per_parameter

BLAS_HANDLES = 2  # of the thread that runs forward and of autograd's, which runs backward: each has a workspace
KINDS = ("weights", "gradients", "optimizer", "copies", "activations", "logits", "buffers", "workspace")
MOMENTS = ("loss", "backward", "end")
GATHERED_UNITS = 2  # FSDP2 prefetches one unit while another computes


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank at its peak, by kind; which moment that is; and the totals of all moments."""

    kinds: dict[str, float]
    moment: str
    totals: dict[str, float]

    @property
    def peak_bytes(self) -> float:
        return sum(self.kinds.values())


def strategy_widths(job: Job, plan: Layout) -> Widths:
    return value_widths(job.precision, autocast=job.autocast and plan.strategy not in SHARDED)


def block_parameters(config: GPTConfig) -> float:
    """Parameters of one block: the unit that FSDP2 gathers."""
    return (config.parameters() - root_parameters(config)) / config.layers


def root_parameters(config: GPTConfig) -> float:
    """Embeddings, head and final norm: what is left when the blocks are units."""
    embedding = (1 if config.tied else 2) * config.vocab_size * config.width
    positions = config.context * config.width if config.positions == "learned" else 0
    return embedding + positions + config.width * (2 if config.bias and config.norm == "layernorm" else 1)


def footprint(job: Job, plan: Layout, accumulate: int) -> Footprint:
    """The largest of the moments."""
    moments = {name: moment_bytes(job, plan, accumulate, name) for name in MOMENTS}
    totals = {name: sum(kinds.values()) for name, kinds in moments.items()}
    peak = max(MOMENTS, key=lambda name: totals[name])
    return Footprint(moments[peak], peak, totals)


def moment_bytes(job: Job, plan: Layout, accumulate: int, moment: str) -> dict[str, float]:
    """Bytes by kind at one moment."""
    model_parallel = plan.tensor * plan.stages
    parameters = job.model.parameters() / model_parallel
    state = state_bytes_per_parameter(job.precision, job.optimizer)
    kinds = dict.fromkeys(KINDS, 0.0)
    kinds["weights"] = state.weights * parameters / (plan.weight_shards / model_parallel)
    kinds["optimizer"] = state.optimizer * parameters / (plan.optimizer_shards / model_parallel)
    kinds["gradients"] = gradient_bytes(job, plan, accumulate, moment)
    kinds["copies"] = copy_bytes(job, plan, moment, accumulate)
    kinds["activations"] = activation_bytes(job, plan, accumulate, moment)
    if moment == "loss":
        each = logit_bytes(strategy_widths(job, plan), job.execution != "eager", job.autocast)
        kinds["logits"] = job.micro_batch * job.context * job.model.vocab_size * each / plan.tensor
    kinds["buffers"] = buffer_bytes(job, plan, accumulate, moment)
    kinds["workspace"] = BLAS_HANDLES * job.device.workspace_bytes
    return kinds


def gradient_bytes(job: Job, plan: Layout, accumulate: int, moment: str) -> float:
    width = state_bytes_per_parameter(job.precision, job.optimizer).gradients
    whole = width * job.model.parameters() / (plan.tensor * plan.stages)
    reduced = width * job.model.parameters() / plan.gradient_shards
    if plan.strategy in SHARDED:
        unreduced = whole if accumulate > 1 and job.no_sync else 0.0
        return unreduced + (reduced if moment == "end" else 0.0)
    in_buckets = plan.strategy in ("ddp", "zero1") and not averages_after_backward(job, plan)
    if in_buckets or accumulate > 1 or moment == "end":
        return reduced
    head = job.model.vocab_size * job.model.width / plan.tensor  # the first gradient that backward makes
    return width * head if moment == "backward" and plan.stages == 1 else 0.0


def shards_within_node(job: Job, plan: Layout) -> bool:
    return plan.strategy == "hsdp" or job.nodes == 1


def gathers_at_once(job: Job, plan: Layout) -> bool:
    """Whether a sharded strategy gathers the whole model at once, as ``parallel/sharded.py`` decides."""
    if plan.strategy not in SHARDED or job.units != "auto":
        return plan.strategy in SHARDED and job.units == "model"
    size = strategy_widths(job, plan).compute * job.model.parameters()
    return shards_within_node(job, plan) and job.link.is_fast and size <= AT_ONCE_SHARE * (job.device.memory_bytes or 0)


def averages_after_backward(job: Job, plan: Layout) -> bool:
    """Whether ddp does, as ``parallel/replicated.py`` decides: it has no buckets then."""
    if plan.strategy != "ddp" or plan.data_ranks == 1:
        return False
    if job.ddp_overlap is not None or job.bucket_bytes:
        return job.ddp_overlap is False
    return job.nodes == 1 and plan.data_ranks == 2 and job.link.is_fast


def exchanges_as_computed(job: Job, plan: Layout, accumulate: int) -> bool:
    """Whether each of two ranks sends the other its gradients in 16 bits instead of reducing them (``parallel/averaging.py``)."""
    straight = job.precision == "bf16-mixed" and not job.autocast and accumulate == 1 and plan.data_ranks == 2
    return straight and averages_after_backward(job, plan)


def gradients_sent_bytes(job: Job, plan: Layout, accumulate: int, no_sync: bool) -> float:
    """Bytes a gradient in a reduction over shards: fp32's, or those it was computed in (``parallel/fsdp2.py``) within a machine,
    unless several micro-batches' have been added up."""
    if job.precision == "bf16-mixed" and shards_within_node(job, plan) and (accumulate == 1 or not no_sync):
        return strategy_widths(job, plan).compute
    return state_bytes_per_parameter(job.precision, job.optimizer).gradients


def copy_bytes(job: Job, plan: Layout, moment: str, accumulate: int) -> float:
    """16-bit copies of weights, or under FSDP2 the gathered units (whole weights whatever the precision).

    The graph keeps the copies until backward has used them; a recomputed block has no graph, so only its own exist.
    Autocast besides casts a weight once and caches it until its context ends: after the last micro-batch's forward, since
    all but the last run their backward inside.
    """
    width = strategy_widths(job, plan)
    if plan.strategy in SHARDED:
        if gathers_at_once(job, plan):
            return width.compute * job.model.parameters()
        units = GATHERED_UNITS if job.reshard_after_forward or moment == "end" else job.model.layers
        return width.compute * (root_parameters(job.model) + units * block_parameters(job.model))
    if job.precision != "bf16-mixed":
        return 0.0
    head = job.model.vocab_size * job.model.width
    block = (job.model.matmul_parameters() - head) / job.model.layers
    graphs = job.model.layers - job.blocks_recomputed
    live = {"loss": head + block * graphs, "backward": block * max(1, graphs), "end": block}[moment]
    second_backward = 2 if moment == "backward" else 1  # the first that starts with gradients and the cache
    if job.autocast and (accumulate > second_backward or moment == "loss"):
        live = job.model.matmul_parameters()
    return width.compute * live / (plan.tensor * plan.stages)


def activation_bytes(job: Job, plan: Layout, accumulate: int, moment: str) -> float:
    model, tokens, width = job.model, job.micro_batch * job.context, strategy_widths(job, plan)
    layer = tokens * layer_saved_bytes(model, job.context, width, job.flash)
    kept = tokens * layer_kept_bytes(model, job.context, width, job.flash, job.recompute)
    if plan.tensor > 1:
        # Korthikanti et al. 2022: the norms' inputs and outputs stay whole on every rank, the rest is divided. Of what selective
        # recomputation keeps the block's input and what `output` left are whole, of full's all.
        norm = tokens * (width.residual + width.compute) * model.width  # its input and output
        layer = 2 * norm + (layer - 2 * norm) / plan.tensor
        whole = {"none": 2.0 * norm, "selective": norm, "full": kept}[job.recompute]
        kept = whole + (kept - whole) / plan.tensor
    passing = tokens * passing_bytes(model, width) / plan.tensor
    if moment == "end":  # the first block's activations make room for its own gradients
        gradients = state_bytes_per_parameter(job.precision, job.optimizer).gradients
        return max(0.0, layer + passing - gradients * block_parameters(model) / plan.gradient_shards)
    if moment == "loss":
        return blocks_bytes(job, plan, accumulate, layer, kept, 0.0) + tokens * ends_saved_bytes(model, width)
    again = computed_again_bytes(layer, kept, job.recompute)
    return blocks_bytes(job, plan, accumulate, layer, kept, again) + passing + tokens * TOKEN_BYTES


def blocks_bytes(job: Job, plan: Layout, accumulate: int, layer: float, kept: float, again: float) -> float:
    """Of the stage that holds most: ``layer`` bytes of a block, ``kept`` of the first ones, which are recomputed; and ``again`` where
    backward begins with one of those.

    One forward, one backward: the first stage holds as many micro-batches as there are stages (Narayanan 2019), the next one less.
    """
    per_stage = -(-job.model.layers // plan.stages)
    found = []
    for stage, first in enumerate(range(0, job.model.layers, per_stage)):
        blocks = min(per_stage, job.model.layers - first)
        recomputed = min(blocks, max(0, job.blocks_recomputed - first))
        held = min(plan.stages - stage, accumulate) * (recomputed * kept + (blocks - recomputed) * layer)
        found.append(held + (again if recomputed == blocks else 0.0))
    return max(found)


def passing_bytes(config: GPTConfig, width: Widths) -> float:
    """Gradients on their way through a block, per token: the residual stream's and the feed-forward's widest one."""
    wide = config.ff_width if config.activation == "gelu" else 2 * config.ff_width
    return width.residual * config.width + width.compute * wide


def buffer_bytes(job: Job, plan: Layout, accumulate: int, moment: str) -> float:
    """Communication buffers beside gradients: FSDP2's gather and reduction of one unit.

    Before the end a gather's flat output exists beside the unit it fills, but for the only unit, whose is given back before
    anything is computed; at the end the root's whole gradients, in compute type and copied for the reduction: once in fp32, or
    what is sent and what arrives in 16 bits.
    """
    if plan.strategy not in SHARDED:
        return averaging_bytes(job, plan, accumulate) if moment == "end" and averages_after_backward(job, plan) else 0.0
    width = strategy_widths(job, plan)
    at_once = gathers_at_once(job, plan)
    if moment != "end":
        return 0.0 if at_once else width.compute * block_parameters(job.model)
    unit = job.model.parameters() if at_once else max(root_parameters(job.model), block_parameters(job.model))
    return (width.compute + FP32_BYTES) * unit


def averaging_bytes(job: Job, plan: Layout, accumulate: int) -> float:
    """When backward is over: a piece that is on its way and the next; in fp32, or both ranks' in 16 bits and the sum of one."""
    parameters, width = job.model.parameters(), state_bytes_per_parameter(job.precision, job.optimizer).gradients
    two = min(parameters, 2 * PIECE_ELEMENTS)
    if exchanges_as_computed(job, plan, accumulate):
        return 2 * strategy_widths(job, plan).compute * two + width * min(parameters, PIECE_ELEMENTS)
    return width * two
