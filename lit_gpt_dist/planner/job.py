"""What is to be planned, checked: a model, a machine, a batch. Knows nothing of strategies."""

from dataclasses import dataclass, replace
from typing import Literal

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import GPTConfig, Recompute, check_recompute_blocks, describe_recompute
from lit_gpt_dist.planner.calibration import Calibration
from lit_gpt_dist.planner.compute import Rates
from lit_gpt_dist.planner.hardware import GIB, UNKNOWN_LINK, Device, Link

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
Execution = Literal["eager", "compiled", "graph"]
Units = Literal["auto", "blocks", "model"]

ASSUMED_MFU = (
    0.40  # published runs of 0.1–8B models on A100 and H100 reach 0.39–0.50; a starting point, not a prediction
)
# parallel/replicated.py: torch.nn.parallel.DistributedDataParallel's default bucket_cap_mb, and ours for a model compiled whole
DDP_BUCKET_BYTES, COMPILED_BUCKET_BYTES = 25.0 * 2**20, 100.0 * 2**20
PIECE_ELEMENTS = 2**29  # parallel/averaging.py: of gradients, sent at a time when backward is over
AT_ONCE_SHARE = 1 / 32  # parallel/fsdp2.py: of a card's memory; weights of up to that are gathered at once, over NVLink
RESERVE_GIB = 2.0  # of a card: CUDA context, NCCL's buffers, fragmentation


@dataclass(frozen=True)
class Job:
    """One training job. Batches count windows; ``devices`` is per node."""

    model: GPTConfig
    device: Device
    devices: int = 1
    nodes: int = 1
    link: Link = UNKNOWN_LINK
    node_link: Link = UNKNOWN_LINK
    global_batch: int = 64
    micro_batch: int = 16
    precision: Precision = "bf16-mixed"
    optimizer: str = "adamw"
    recompute: Recompute = "none"
    recompute_blocks: int | None = None  # of how many blocks, the first; None: of all
    flash: bool = True
    execution: Execution = "eager"
    overlap: bool = True
    no_sync: bool = True
    reshard_after_forward: bool = True
    units: Units = "auto"  # what fsdp2 and hsdp gather at a time
    autocast: bool = False  # 16 bits in products only, as 16-mixed and other loops have it; FSDP2 never has
    mfu: float = ASSUMED_MFU
    reserve_bytes: float = RESERVE_GIB * GIB
    bucket_bytes: float | None = None  # None: what `fit` does
    ddp_overlap: bool | None = None  # whether ddp averages gradients while backward runs; None: what `fit` does
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "nodes", "global_batch", "micro_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at least 1")
        check_recompute_blocks(self.recompute, self.recompute_blocks, self.model.layers)
        if not 0 < self.mfu <= 1:
            raise UserError(f"mfu {self.mfu} is not a share; give a number above 0 and at most 1")
        if self.reserve_bytes < 0:
            raise UserError(f"reserve {self.reserve_bytes / GIB:g} GiB is below 0; give 0 or more")
        if self.usable_bytes is not None and self.usable_bytes <= 0:
            raise UserError(
                f"reserve {self.reserve_bytes / GIB:g} GiB is not below the {(self.device.memory_bytes or 0) / GIB:g} GiB that "
                f"{self.device.name} has; give a --reserve_gib below that, or other cards"
            )

    @property
    def bucket(self) -> float:
        """Bytes of gradients that DDP sends at once."""
        return self.bucket_bytes or (DDP_BUCKET_BYTES if self.execution == "eager" else COMPILED_BUCKET_BYTES)

    @property
    def blocks_recomputed(self) -> int:
        if self.recompute == "none":
            return 0
        return self.model.layers if self.recompute_blocks is None else self.recompute_blocks

    @property
    def share_recomputed(self) -> float:
        """Of the blocks."""
        return self.blocks_recomputed / self.model.layers

    @property
    def recompute_words(self) -> str:
        return describe_recompute(self.recompute, self.recompute_blocks, self.model.layers)

    @property
    def world(self) -> int:
        return self.devices * self.nodes

    @property
    def context(self) -> int:
        return self.model.context

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.context

    @property
    def usable_bytes(self) -> float | None:
        """Of one card, or None when its memory is not known."""
        return None if self.device.memory_bytes is None else self.device.memory_bytes - self.reserve_bytes

    @property
    def slowest_link(self) -> Link:
        """A ring over several nodes is as fast as its slowest link."""
        return self.node_link if self.nodes > 1 else self.link

    def accumulate(self, data_ranks: int) -> int:
        """Micro-batches a step on each of ``data_ranks`` ranks.

        Raises:
            UserError: the global batch is not a multiple of micro batch × ranks.
        """
        per_pass = self.micro_batch * data_ranks
        if self.global_batch % per_pass:
            raise UserError(self._does_not_divide(data_ranks))
        return self.global_batch // per_pass

    def _does_not_divide(self, data_ranks: int) -> str:
        """As `fit` says it (data/windows.py, which planning does not import: it needs numpy)."""
        per_pass = self.micro_batch * data_ranks
        below = self.global_batch // per_pass * per_pass
        remedies = [f"{below} or {below + per_pass}" if below else f"{per_pass}"]
        if self.global_batch % data_ranks == 0:
            share = self.global_batch // data_ranks
            fits = max(n for n in range(1, min(self.micro_batch, share) + 1) if share % n == 0)
            remedies.append(f"a micro batch of {fits} and accumulate {share // fits}")
        return (
            f"global batch {self.global_batch} is not divisible by micro batch {self.micro_batch} × {data_ranks} data ranks"
            f" = {per_pass}; use a global batch of {', or '.join(remedies)}"
        )

    @property
    def rates(self) -> Rates | None:
        """Measured rates that apply to this job's precision."""
        return self.calibration.rates_for(self.precision) if self.calibration else None

    def with_micro_batch(self, micro_batch: int) -> "Job":
        return replace(self, micro_batch=micro_batch)
