"""Bytes that ranks send, and how long a link takes. Knows nothing of models, devices or overlap.

Ring algorithms, S bytes over N ranks at W bytes/s of bus bandwidth (Patarasuk and Yuan 2009; nccl-tests, PERFORMANCE.md).
"""


def share(ranks: int) -> float:
    """(N − 1)/N: the part of a buffer that a ring moves over each link in a reduce-scatter or an all-gather."""
    return (ranks - 1) / ranks


def all_reduce_seconds(size_bytes: float, ranks: int, bandwidth: float) -> float:
    """2·(N−1)/N·S/W; nothing for one rank."""
    return 2 * share(ranks) * size_bytes / bandwidth


def reduce_scatter_seconds(size_bytes: float, ranks: int, bandwidth: float) -> float:
    """Half an all-reduce: (N−1)/N·S/W, S the whole input."""
    return share(ranks) * size_bytes / bandwidth


def all_gather_seconds(size_bytes: float, ranks: int, bandwidth: float) -> float:
    """Half an all-reduce: (N−1)/N·S/W, S the whole output."""
    return share(ranks) * size_bytes / bandwidth


def ddp_bytes(parameters: float, ranks: int, gradient_bytes: float, accumulate: int = 1, no_sync: bool = True) -> float:
    """Bytes a card sends per step: 2·(N−1)/N·Ψ·g, once with ``no_sync``, else for each of the A micro-batches."""
    return 2 * share(ranks) * parameters * gradient_bytes * (1 if no_sync else accumulate)


def fsdp_bytes(
    parameters: float,
    ranks: int,
    parameter_bytes: float,
    gradient_bytes: float,
    accumulate: int = 1,
    no_sync: bool = False,
    gathers: float = 2,
) -> float:
    """Bytes a card sends per step: (N−1)/N·Ψ·(2·p + g) a micro-batch; ``no_sync`` reduces once but still gathers.

    ``gathers``, a micro-batch: 2 when weights are freed after the forward (forward and backward each gather), 1 when they are
    kept until backward has used them, 1/A when they are kept for all A micro-batches.
    """
    gathered = gathers * parameter_bytes * accumulate
    reduced = gradient_bytes * (1 if no_sync else accumulate)
    return share(ranks) * parameters * (gathered + reduced)


def tensor_parallel_all_reduce_bytes(batch: int, sequence: int, width: int, element_bytes: int = 2) -> float:
    """One all-reduce of a layer's output: b·s·h elements (Shoeybi et al. 2019)."""
    return float(batch * sequence * width * element_bytes)


def tensor_parallel_bytes(batch: int, sequence: int, width: int, layers: int, element_bytes: int = 2) -> float:
    """Buffers all-reduced per micro-batch: 4 a layer, two in forward and two in backward."""
    return 4 * layers * tensor_parallel_all_reduce_bytes(batch, sequence, width, element_bytes)


def pipeline_bytes(batch: int, sequence: int, width: int, element_bytes: int = 2) -> float:
    """Activations forward and their gradients backward over one stage border, per micro-batch."""
    return 2.0 * batch * sequence * width * element_bytes


def communication_to_compute(flops_per_second: float, bandwidth: float, tokens: float, ranks: int = 4) -> float:
    """Time to all-reduce fp32 gradients over time to compute them, for ``tokens`` tokens per card and reduction.

    2·(N−1)/N·4·Ψ/W over 6·Ψ·tokens/(P·MFU); for N = 4 both constants are 6: P·MFU/(W·tokens).
    """
    return 2 * share(ranks) * 4 / 6 * flops_per_second / (bandwidth * tokens)


def tokens_for_share(flops_per_second: float, bandwidth: float, wanted_share: float, ranks: int = 4) -> float:
    """Tokens a card must compute between reductions so that communication is ``wanted_share`` of compute."""
    return communication_to_compute(flops_per_second, bandwidth, 1.0, ranks) / wanted_share
