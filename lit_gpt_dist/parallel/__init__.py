"""Everything that knows about several devices. ``DDP``, ``FSDP2`` and ``HSDP`` can be named by class path on the command line."""

from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.strategy import Strategy

from lit_gpt_dist.parallel.replicated import DDP
from lit_gpt_dist.parallel.sharded import FSDP2, HSDP
from lit_gpt_dist.parallel.strategies import SingleDevice

STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (SingleDevice, DDP, FSDP2, HSDP)}

for _name, _class in STRATEGIES.items():  # so that Trainer(strategy="fsdp2") works in anybody's script
    StrategyRegistry.register(_name, _class, description=_class.__doc__ or "", override=True)

__all__ = ["DDP", "FSDP2", "HSDP", "STRATEGIES", "SingleDevice"]
