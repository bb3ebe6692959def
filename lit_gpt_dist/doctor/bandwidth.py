"""Bandwidth words exactly as nccl-tests defines them (its PERFORMANCE.md). Numbers in, numbers out.

algbw = S / t, where S is the size of the *larger* buffer: the whole vector for all-reduce and broadcast, the output of an
all-gather, the input of a reduce-scatter, the send buffer of an all-to-all. busbw = algbw × a factor that makes the figure
comparable with the link's own bandwidth whatever the number of ranks.
"""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def algorithm_bandwidth(size_bytes: float, seconds: float) -> float:
    return size_bytes / seconds


def bus_factor(collective: str, ranks: int) -> float:
    """2(n−1)/n for all-reduce, (n−1)/n for all-gather, reduce-scatter and all-to-all, 1 for broadcast."""
    if collective == "broadcast":
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def bus_bandwidth(collective: str, size_bytes: float, seconds: float, ranks: int) -> float:
    return algorithm_bandwidth(size_bytes, seconds) * bus_factor(collective, ranks)


def sweep_sizes(smallest: int, largest: int, factor: int = 4) -> list[int]:
    """Sizes in bytes from smallest to largest, both included."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return [*sizes, largest]
