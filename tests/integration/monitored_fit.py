"""`fit` with a fault named by LIT_GPT_DIST_FAULT that monitoring must find. Only for tests.

Faults: nan:RANK:STEP, slow-data:RANK:MS, slow-compute:RANK:MS, skip-collective:RANK:STEP, stall:RANK:STEP, oom:RANK:STEP (STEP counts from 1).
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


def plant(kind: str, rank: int, number: int) -> None:
    import torch

    from lit_gpt_dist.module import GPTModule

    accumulate, micro_loss = GPTModule._accumulate, GPTModule._micro_loss

    def here(module: Any) -> bool:
        return module.trainer.global_rank == rank

    def at_step(module: Any) -> bool:
        planted = getattr(module, "planted", False)
        if here(module) and not planted and module.trainer.global_step + 1 == number:
            module.planted = True  # once: not again after going back
            return True
        return False

    def poisoned(self: Any, windows: Any, index: int) -> Any:
        loss = micro_loss(self, windows, index)
        return loss * float("nan") if at_step(self) else loss

    def slow(self: Any, windows: Any, index: int) -> Any:
        if here(self):
            time.sleep(number / 1000)
        return micro_loss(self, windows, index)

    def no_memory(self: Any, windows: Any) -> Any:
        if at_step(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return accumulate(self, windows)

    def stall(self: Any, windows: Any) -> Any:
        if at_step(self):
            time.sleep(10_000)
        return accumulate(self, windows)

    def skip_collective(self: Any, windows: Any) -> Any:
        """As a log call in a branch that one rank does not take."""
        if not hasattr(self, "apart"):
            self.apart = torch.distributed.new_group(backend="gloo")
        if not at_step(self) and self.trainer.global_step + 1 == number:
            torch.distributed.all_reduce(torch.ones(1), group=self.apart)
        return accumulate(self, windows)

    if kind == "slow-data":
        from lit_gpt_dist.data.datamodule import GPTDataModule

        transfer = GPTDataModule.transfer_batch_to_device

        def slow_transfer(self: Any, batch: Any, device: Any, index: int) -> Any:
            if self.trainer.global_rank == rank:
                time.sleep(number / 1000)
            return transfer(self, batch, device, index)

        GPTDataModule.transfer_batch_to_device = slow_transfer  # type: ignore[method-assign]
    elif kind in ("slow-compute", "nan"):
        GPTModule._micro_loss = {"slow-compute": slow, "nan": poisoned}[kind]  # type: ignore[method-assign]
    else:
        steps = {"stall": stall, "skip-collective": skip_collective, "oom": no_memory}
        GPTModule._accumulate = steps[kind]  # type: ignore[method-assign]  # in every way through a step


if __name__ == "__main__":
    if os.environ.get("LIT_GPT_DIST_FAULT"):
        kind, rank, number = os.environ["LIT_GPT_DIST_FAULT"].split(":")
        plant(kind, int(rank), int(number))
    from lit_gpt_dist.cli import main

    sys.exit(main())
