"""What a run watches, and what it does when something is wrong (``--monitor.*``)."""

from dataclasses import dataclass
from typing import Literal

from lit_gpt_dist.errors import UserError

Policy = Literal["stop", "skip", "rollback", "ignore"]


@dataclass
class MonitorOptions:
    """What a run watches; steps are optimizer steps.

    Args:
        enabled: False leaves only loss, learning rate and speed.
        window: steps that the percentiles of the step time are taken over.
        sample_every: every so many steps one is taken apart: data, forward, backward, communication, optimizer; 0: never.
        memory: device and host memory at each reading.
        learning: size of the update against the weights at each reading.
        on_bad_step: a gradient norm that is not finite: stop; skip the update; rollback to the last checkpoint; or ignore.
        spike_factor: a gradient norm over this many times its running mean is bad too; None: only NaN and infinity.
        rollback_skip_steps: after a rollback the data go on so many steps past the one before the bad step.
        max_rollbacks: the run stops at the next one.
        hang_watch: when nothing moves for the strategy's timeout_seconds, every rank says where it stands, and the run ends.
        memory_snapshot: keep the history of device allocations and write it when memory runs out (costs some speed).
        sample_tokens: length of the text logged for TensorBoard at each validation; by default 64, and none where weights are
            sharded; 0: none. The one printed after training has --sample_tokens.
        csv: write metrics.csv beside TensorBoard's events.
    """

    enabled: bool = True
    window: int = 500
    sample_every: int = 20
    memory: bool = True
    learning: bool = True
    on_bad_step: Policy = "stop"
    spike_factor: float | None = None
    rollback_skip_steps: int = 1
    max_rollbacks: int = 3
    hang_watch: bool = True
    memory_snapshot: bool = False
    sample_tokens: int | None = None
    csv: bool = True

    def __post_init__(self) -> None:
        for name, low in (("window", 1), ("sample_every", 0), ("rollback_skip_steps", 1), ("max_rollbacks", 0)):
            if getattr(self, name) < low:
                raise UserError(f"monitor.{name} {getattr(self, name)} must be at least {low}")
        if self.spike_factor is not None and self.spike_factor <= 1:
            raise UserError(f"monitor.spike_factor {self.spike_factor} must be above 1; leave it out for none")
        if self.sample_tokens is not None and self.sample_tokens < 0:
            raise UserError(f"monitor.sample_tokens {self.sample_tokens} must be 0 or more")


def parse_profile(text: str, first_step: int) -> tuple[int, int]:
    """First and last step to trace: ``A-B``, or ``N`` for N steps from ``first_step`` on (steps count from 1).

    Raises:
        UserError: neither of the two.
    """
    first, dash, last = text.partition("-")
    if first.isdigit() and (last.isdigit() if dash else True):
        span = (int(first), int(last)) if dash else (first_step, first_step + int(first) - 1)
        if 1 <= span[0] <= span[1]:
            return span
    raise UserError(f"profile {text!r} is not a number of steps or a span of steps; use for example 5 or 20-24")
