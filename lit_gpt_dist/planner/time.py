"""Step time from compute and communication. Knows nothing of what is computed or sent.

``None`` for a communication time means unknown, and makes every figure that depends on it unknown too.
"""

BACKWARD_SHARE = 2 / 3  # of compute: backward has two matrix products for each of forward's (Kaplan et al. 2020)


def exposed_seconds(communication: float, backward: float, least: float = 0.0) -> float:
    """What overlap cannot hide: max(least, t_comm − t_bwd), t_bwd of the last micro-batch.

    ``least``: what can start only when backward has ended. 0 is the ideal, of infinitely small pieces.
    """
    return max(least, communication - backward)


def ddp_step_seconds(
    micro_compute: float, accumulate: int, communication: float, overlap: bool = True, last_bucket: float = 0.0
) -> float:
    """A·(t_fwd + t_bwd) + what is exposed of one reduction (at least its ``last_bucket``), or all of it without overlap."""
    exposed = exposed_seconds(communication, BACKWARD_SHARE * micro_compute, last_bucket) if overlap else communication
    return accumulate * micro_compute + exposed


def fsdp_exposed_seconds(
    micro_compute: float,
    gather: float,
    reduce: float,
    gathers: int = 2,
    first_gather: float = 0.0,
    last_reduce: float = 0.0,
) -> float:
    """Exposed part of one micro-batch: a gather behind forward; the second gather and the reduction behind backward.

    At least ``first_gather``, which forward waits for, and ``last_reduce``, which waits for backward; 0 is the ideal.
    """
    backward = BACKWARD_SHARE * micro_compute
    again = gather if gathers == 2 else 0.0
    before = exposed_seconds(gather, micro_compute - backward, first_gather)
    return before + exposed_seconds(again + reduce, backward, last_reduce)


def efficiency(one_card_seconds: float, step_seconds: float) -> float:
    """Scaling efficiency at a fixed batch per card: t(1)/t(N)."""
    return one_card_seconds / step_seconds


def efficiency_from_rates(tokens_per_second: float, one_card_tokens_per_second: float, ranks: int) -> float:
    """The same from rates: tok/s(N) / (N · tok/s(1))."""
    return tokens_per_second / (ranks * one_card_tokens_per_second)


def bubble_share(stages: int, micro_batches: int) -> float:
    """Idle share of a pipeline's step: (p − 1)/(m + p − 1) (Huang et al. 2019)."""
    return (stages - 1) / (micro_batches + stages - 1)


def bubble_over_useful(stages: int, micro_batches: int, interleave: int = 1) -> float:
    """Idle time over useful time: (p − 1)/m, divided by v when interleaved (Narayanan et al. 2021)."""
    return (stages - 1) / micro_batches / interleave
