"""How often to save: the interval at which saving and losing work cost least together. Numbers in, numbers out."""

import math


def best_interval_seconds(save_seconds: float, failure_seconds: float) -> float:
    """√(2·c·T): seconds of work between saves, for ``save_seconds`` c of blocked training a save and a mean time T
    between failures (J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974).

    The first-order formula holds while c is far below T; above T/2 nothing is gained by saving more often than that.
    """
    if save_seconds < 0 or failure_seconds <= 0:
        raise ValueError(f"save_seconds {save_seconds} must be ≥ 0 and failure_seconds {failure_seconds} > 0")
    return math.sqrt(2 * save_seconds * failure_seconds)


def lost_share(interval_seconds: float, save_seconds: float, failure_seconds: float) -> float:
    """Share of the time that saving (c/τ) and repeating lost work (τ/2T) cost at this interval (Young 1974, eq. 3)."""
    return save_seconds / interval_seconds + interval_seconds / (2 * failure_seconds)


def advice(save_seconds: float, failure_hours: float, step_seconds: float) -> str:
    """One sentence: the best interval in seconds and in steps, and what it costs."""
    failure_seconds = failure_hours * 3600
    seconds = best_interval_seconds(save_seconds, failure_seconds)
    steps = max(1, round(seconds / step_seconds))
    share = lost_share(max(seconds, step_seconds), save_seconds, failure_seconds)
    return (
        f"a save blocks {save_seconds:.3g} s; with a failure every {failure_hours:g} h, save every {seconds:.0f} s, "
        f"which is every {steps} steps (√(2cT), Young 1974): {share:.2%} of the time goes to saving and repeating"
    )
