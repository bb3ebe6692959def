"""Everything that knows about several devices. ``DDP`` and ``FSDP2`` can be named by class path on the command line."""

from lit_gpt_dist.parallel.strategies import DDP, FSDP2, STRATEGIES, SingleDevice

__all__ = ["DDP", "FSDP2", "STRATEGIES", "SingleDevice"]
