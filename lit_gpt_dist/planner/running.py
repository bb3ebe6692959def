"""Rules for runs that last weeks: failures, stragglers, learning rates, cost. Knows nothing of models."""

import math
from typing import NamedTuple

STRAGGLER_FACTOR = 1.15
GOOD_SHARE, ACCEPTABLE_SHARE = 0.20, 0.40
SECONDS_PER_DAY = 86_400.0


def mean_time_between_failures(one_node: float, nodes: int) -> float:
    """That of one node divided by the nodes, in the same unit: failures are independent."""
    return one_node / nodes


def checkpoint_interval_seconds(checkpoint_seconds: float, failure_seconds: float) -> float:
    """√(2·c·T): the interval that loses least to saving and to repeating (Young 1974)."""
    return math.sqrt(2 * checkpoint_seconds * failure_seconds)


def is_straggler(step_seconds: float, median_seconds: float) -> bool:
    return step_seconds > STRAGGLER_FACTOR * median_seconds


def scaled_learning_rate(base: float, batch_growth: float, optimizer: str) -> float:
    """Linear for SGD (Goyal et al. 2017, with warm-up), square root for Adam-like (Malladi et al. 2022)."""
    return base * (batch_growth if optimizer == "sgd" else math.sqrt(batch_growth))


def judge_communication(share: float) -> str:
    """Communication's share of a step in a word: under 20% good, up to 40% acceptable, above it the bottleneck."""
    if share < GOOD_SHARE:
        return "good"
    return "acceptable" if share <= ACCEPTABLE_SHARE else "the bottleneck"


class Cost(NamedTuple):
    days: float
    card_hours: float


def cost(tokens: float, tokens_per_second: float, devices: int) -> Cost:
    """Days and card-hours that ``tokens`` tokens take at a rate of all devices together."""
    seconds = tokens / tokens_per_second
    return Cost(seconds / SECONDS_PER_DAY, seconds / 3600 * devices)
