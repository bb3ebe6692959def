"""How each strategy divides state, activations and data over ranks: degrees only, no bytes, no seconds."""

from dataclasses import dataclass

from lit_gpt_dist.planner.job import Job

STRATEGIES = ("single", "ddp", "zero1", "zero2", "fsdp2", "hsdp", "tp", "pp")
# Planned here, but `fit` of this version does not run them. Shorten the list when it does.
NOT_TRAINABLE = ("zero1", "zero2", "tp", "pp")
SHARDED = ("fsdp2", "hsdp")  # those that shard the weights themselves


@dataclass(frozen=True)
class Layout:
    """Degrees of one strategy. ``impossible`` says why it does not exist for this job, or is empty."""

    strategy: str
    data_ranks: int = 1  # ranks with different windows
    weight_shards: int = 1
    gradient_shards: int = 1
    optimizer_shards: int = 1
    tensor: int = 1
    stages: int = 1
    impossible: str = ""

    @property
    def ranks(self) -> int:
        return self.data_ranks * self.tensor * self.stages


def layout(job: Job, strategy: str) -> Layout:
    world = job.world
    if strategy == "single":
        return Layout(strategy)
    if world == 1:
        return Layout(strategy, impossible="needs at least 2 devices")
    if strategy == "ddp":
        return Layout(strategy, world)
    if strategy == "zero1":
        return Layout(strategy, world, optimizer_shards=world)
    if strategy == "zero2":
        return Layout(strategy, world, gradient_shards=world, optimizer_shards=world)
    if strategy == "fsdp2":
        return Layout(strategy, world, world, world, world)
    if strategy == "hsdp":
        if job.nodes == 1 or job.devices == 1:
            return Layout(
                strategy,
                impossible="shards inside a node and replicates across nodes: needs 2 nodes of 2 devices (on one, fsdp2 takes less)",
            )
        return Layout(strategy, world, job.devices, job.devices, job.devices)
    return tensor_layout(job) if strategy == "tp" else pipeline_layout(job)


def tensor_layout(job: Job) -> Layout:
    degree = job.devices
    if degree == 1:
        return Layout("tp", impossible="needs at least 2 devices in a node")
    if job.model.heads % degree or job.model.kv_heads % degree:
        return Layout(
            "tp",
            impossible=f"{job.model.heads} heads and {job.model.kv_heads} key/value heads do not divide by {degree}",
        )
    return Layout("tp", job.nodes, degree, degree, degree, tensor=degree)


def pipeline_layout(job: Job) -> Layout:
    """Stages across nodes, or over all devices of a single node; data parallel over the rest."""
    stages = job.nodes if job.nodes > 1 else job.devices
    if stages > job.model.layers:
        return Layout("pp", impossible=f"{stages} stages for {job.model.layers} layers")
    return Layout("pp", job.world // stages, stages, stages, stages, stages=stages)
