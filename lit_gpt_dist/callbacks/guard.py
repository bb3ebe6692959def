"""Keeps a step whose gradients are not finite, or far too large, from reaching the weights, and decides what comes next.

The gradient norm is over all ranks, so every rank sees the same number and comes to the same decision without talking. The
bad update is prevented on the device (fused AdamW's ``found_inf``), without waiting. Whether there was one is part of every
reading; which step it was is looked at after a reading that says so, and before a save or a validation. Until then ``stop`` and
``rollback`` keep the weights as they were before it.
"""

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback
from lit_gpt_dist.callbacks.notices import complain, tell
from lit_gpt_dist.callbacks.options import Policy
from lit_gpt_dist.callbacks.reading import log_metrics
from lit_gpt_dist.callbacks.recorder import StepRecorder, find_recorder
from lit_gpt_dist.callbacks.rollback import rollback
from lit_gpt_dist.errors import EXIT_FAILURE, RunStopped, UserError
from lit_gpt_dist.optim.groups import is_fused
from lit_gpt_dist.parallel.compile import one_kernel

SKIPS_IN_A_ROW = 50  # so many, and nothing is learned any more: stop
MEMORY = 0.98  # of the running mean of gradient norms
SETTLING = 20  # norms before a spike can be told


class Diverged(RunStopped):
    """Training stopped at a bad step, on all ranks alike. Nothing was saved: the last checkpoint is from before it."""

    def __init__(self, step: int, text: str) -> None:
        Exception.__init__(self, text)
        self.exit_code = EXIT_FAILURE
        self.step = step


class BadStepGuard(pl.Callback):
    """Stands in front of whatever saves.

    Args:
        policy: stop, skip, or rollback.
        spike_factor: a norm over this many times the running mean is bad too.
        skip_steps: how far past the step before the bad one the data go on after a rollback.
        max_rollbacks: the next one stops the run.
    """

    def __init__(
        self, policy: Policy = "stop", spike_factor: float | None = None, skip_steps: int = 1, max_rollbacks: int = 3
    ) -> None:
        self.policy = policy
        self.spike_factor = spike_factor
        self.skip_steps = skip_steps
        self.max_rollbacks = max_rollbacks
        self.skipped_steps: list[int] = []
        self.rollbacks: list[tuple[int, int]] = []  # (bad step, step gone back to)
        self._sticky = policy != "skip"
        self._found = torch.zeros(())  # 1: the coming update must be left out
        self._mark: Callable[..., None] = mark_bad
        self._bad_steps = torch.zeros(())  # updates left out, of the whole run
        self._bad_steps_known = 0.0  # of them, those that have been looked at
        self._alarm = False  # the last reading told of new ones
        self._asked = self._covered = 0  # steps up to which a reading was begun; was finished, not yet taken note of
        self._tripped = False  # on a CPU: a step was bad, and all updates since are left out
        self._seen: list[tuple[int, Tensor, Tensor, Tensor | None]] = []  # step, loss, norm, spike flag
        self._flag: Tensor | None = None
        self._mean: Tensor | None = None
        self._count = 0
        self._in_a_row = 0
        self._scaled = False
        self._recorder: StepRecorder | None = None
        self._save_every: int | None = None

    # ---- on the device, at every step -----------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._recorder = find_recorder(trainer)
        saves = next((c for c in trainer.callbacks if isinstance(c, CheckpointCallback)), None)  # type: ignore[attr-defined]
        self._save_every = saves.every_n_steps if saves is not None else None
        device = module.device
        self._found = torch.zeros((), device=device)
        self._bad_steps, self._bad_steps_known, self._alarm = torch.zeros((), device=device), 0.0, False
        self._mark = one_kernel(mark_bad, module.compiled, device)
        self._tripped = False
        self._asked = self._covered = 0
        if self._recorder is not None and self not in self._recorder.parts:
            self._recorder.parts.append(self)
        self._scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        if not self._scaled:  # a gradient scaler skips by itself, and infinite norms are part of its search
            module.norm_watcher = self._watch

    def _watch(self, optimizer: Optimizer, norm: Tensor) -> None:
        """Before the update: lets the optimizer leave the weights alone if the step is bad, or one was."""
        if self._nothing_wrong(norm):
            if hasattr(optimizer, "found_inf"):
                del optimizer.found_inf
            return
        if self.spike_factor is not None:
            norm = self._spikes_as_nan(norm, self.spike_factor)
        self._mark(norm, self._found, self._bad_steps, self._sticky)
        if is_fused(optimizer):  # takes a flag on the device that says whether to leave everything as it is
            optimizer.found_inf = self._found  # type: ignore[attr-defined]
        elif bool(self._found):  # waits for the device; on a CPU that costs nothing
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # an optimizer leaves such a parameter alone

    def _nothing_wrong(self, norm: Tensor) -> bool:
        """On a CPU, where a look costs nothing, and a flag that the optimizer has to heed a few percent of a small step."""
        if norm.device.type != "cpu" or self.spike_factor is not None or self._tripped:
            return False
        calm = math.isfinite(float(norm))
        self._tripped = self._sticky and not calm
        return calm

    def _spikes_as_nan(self, norm: Tensor, factor: float) -> Tensor:
        if self._mean is None:
            self._mean = torch.where(torch.isfinite(norm), norm.detach(), 0)
        self._mean = self._mean.to(norm)  # from a checkpoint it comes on the host
        spike = (norm > factor * self._mean) & (self._count >= SETTLING)
        self._flag = spike
        calm = torch.isfinite(norm) & ~spike
        self._mean = torch.where(calm, self._mean.lerp(norm, 1 - MEMORY), self._mean)
        self._count += 1
        return torch.where(spike, torch.nan, norm)

    # ---- looking at what happened ---------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        norm = module.step_loss if self._scaled else module.gradient_norm
        self._seen.append((trainer.global_step, module.step_loss, norm, self._flag))
        self._flag = None
        if self._scaled:
            self._judge_losses(trainer, module)
        elif self._alarm or self._due(trainer):
            self._decide(trainer, module)
        else:
            self._forget_read()

    def measure(self, trainer: pl.Trainer, module: Any) -> list[Tensor]:
        """As a part of a reading: how many updates were left out so far."""
        self._asked = trainer.global_step
        return [self._bad_steps]

    def report(self, trainer: pl.Trainer, module: Any, rows: list[list[float]]) -> dict[str, float]:
        self._alarm = rows[0][0] > self._bad_steps_known  # the same on all ranks
        self._covered = self._asked
        return {}

    def _forget_read(self) -> None:
        """Drops the steps that a reading without alarm has covered, once: after a rollback steps have earlier numbers again."""
        if self._covered:
            self._seen = [entry for entry in self._seen if entry[0] > self._covered]
            self._in_a_row = self._covered = 0

    def _judge_losses(self, trainer: pl.Trainer, module: Any) -> None:
        """Under a scaler: only what a reading has covered, for a loss is the same on all ranks once it has been averaged."""
        if self._recorder is None or not self._covered:
            return
        read = [entry for entry in self._seen if entry[0] <= self._covered]
        self._covered = 0
        if not read:
            return
        later = self._seen[len(read) :]
        means = self._recorder.losses[-len(read) :]
        self._seen = [
            (step, loss, torch.tensor(mean), None) for (step, loss, *_), mean in zip(read, means, strict=True)
        ]
        self._decide(trainer, module)
        self._seen = later

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """A save that nobody could foresee, on a signal: never of a state behind a bad step."""
        if self._seen and not self._scaled:
            self._decide(trainer, module, saving=True)

    def _due(self, trainer: pl.Trainer) -> bool:
        step = trainer.global_step
        if step >= trainer.max_steps or (self._save_every and step % self._save_every == 0):
            return True
        if self._recorder is None and step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            return True
        loop = trainer.fit_loop
        return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))  # type: ignore[arg-type]

    def _decide(self, trainer: pl.Trainer, module: Any, saving: bool = False) -> None:
        """Reads the norms since the last look (waits for the device) and acts on the first bad one."""
        self._alarm = False
        seen, self._seen = self._seen, []
        bad = [index for index, value in enumerate(read_flags(seen)) if value]
        self._count_in_a_row(len(seen), bad)
        if not bad:
            left_out = bool(seen) and float(self._bad_steps) > self._bad_steps_known
            if left_out:  # should not happen; better than weights that stand still
                self._stop(trainer, seen[0][0], f"updates were left out for a bad step before step {seen[0][0]}")
            return
        self._bad_steps_known = float(self._bad_steps)
        step, loss, norm, _ = seen[bad[0]]
        what = self._describe(trainer, step, loss, norm)
        if self.policy == "skip" and self._in_a_row < SKIPS_IN_A_ROW:
            self._note_skips(trainer, [seen[index][0] for index in bad], what)
        elif self.policy == "rollback" and not saving and len(self.rollbacks) < self.max_rollbacks:
            self._go_back(trainer, module, step, what)
        else:
            self._stop(trainer, step, what)

    def _count_in_a_row(self, length: int, bad: list[int]) -> None:
        if len(bad) == length:
            self._in_a_row += length
        else:
            self._in_a_row = 0

    def _describe(self, trainer: pl.Trainer, step: int, loss: Tensor, norm: Tensor) -> str:
        """The same on every rank. Communicates: whose loss it was."""
        strategy: Any = trainer.strategy
        losses = strategy.all_gather(loss.detach().float()).reshape(-1).tolist()
        culprits = [str(rank) for rank, value in enumerate(losses) if not math.isfinite(value)]
        where = f" (loss not finite on rank {', '.join(culprits)})" if culprits else ""
        if not culprits and math.isfinite(float(norm)):
            where = f", over {self.spike_factor:g} × its running mean"
        return f"step {step}: {'loss' if self._scaled else 'gradient norm'} {float(norm):.4g}{where}"

    def _note_skips(self, trainer: pl.Trainer, steps: list[int], what: str) -> None:
        self.skipped_steps += steps
        more = f", and {len(steps) - 1} more since" if len(steps) > 1 else ""
        tell(trainer, f"{what}; its update was skipped{more} ({len(self.skipped_steps)} in this run)")
        log_metrics(trainer, {"health/skipped_steps": len(self.skipped_steps)}, trainer.global_step)

    def _go_back(self, trainer: pl.Trainer, module: Any, step: int, what: str) -> None:
        try:
            to = rollback(trainer, module, step, self.skip_steps)
        except UserError as error:
            self._stop(trainer, step, f"{what}; {error}")
            return
        self.rollbacks.append((step, to))
        self._found.zero_()
        self._tripped, self._covered = False, 0
        self._mean, self._count = None, 0
        tell(trainer, f"{what}; back to the checkpoint of step {to}, the data go on after the bad ones")
        log_metrics(trainer, {"health/rollbacks": len(self.rollbacks)}, trainer.global_step)

    def _stop(self, trainer: pl.Trainer, step: int, what: str) -> None:
        kept = save_batch(trainer, step)
        again = f" after {len(self.rollbacks)} rollbacks" if self.rollbacks else ""
        text = (
            f"{what}; stopped{again}. The weights stayed those of step {step - 1}; the batch is in {kept}. Go on from the last "
            "checkpoint with a lower --optim.lr, --monitor.on_bad_step skip, or rollback"
        )
        complain(trainer, text)
        raise Diverged(step, text)

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        module.norm_watcher = None
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "found_inf"):
                del optimizer.found_inf

    def state_dict(self) -> dict[str, Any]:
        mean = None if self._mean is None else float(self._mean)
        return {
            "skipped_steps": self.skipped_steps, "rollbacks": self.rollbacks, "norm_mean": mean, "norms": self._count,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped_steps = list(state_dict["skipped_steps"])
        self.rollbacks = [tuple(pair) for pair in state_dict.get("rollbacks", ())]
        # what a spike is told by; checkpoints of earlier versions have none of it
        mean = state_dict.get("norm_mean")
        self._mean = None if mean is None else torch.tensor(mean, dtype=torch.float64)
        self._count = state_dict.get("norms", 0)


def mark_bad(norm: Tensor, found: Tensor, bad_steps: Tensor, sticky: bool) -> None:
    """Writes into ``found`` whether the update with this ``norm`` must be left out, and counts it in ``bad_steps``.

    Scalars on the device. ``sticky``: so must every one after it.
    """
    bad = (~torch.isfinite(norm)).to(found.dtype)
    found.copy_(torch.maximum(found, bad) if sticky else bad)
    bad_steps.add_(found)


def read_flags(seen: list[tuple[int, Tensor, Tensor, Tensor | None]]) -> list[bool]:
    """Which of the steps were bad; one wait for the device."""
    norms = torch.stack([norm.float() for _, _, norm, _ in seen])
    bad = ~torch.isfinite(norms)
    if any(flag is not None for *_, flag in seen):
        bad |= torch.stack([norms.new_zeros(()).bool() if flag is None else flag for *_, flag in seen])
    return bad.tolist()


def save_batch(trainer: Any, step: int) -> str:
    """The windows of a step, of all ranks together, for whoever wants to look at them. Rank 0 writes."""
    path = trainer.run_dir / f"bad-step-{step:08d}.pt"
    if trainer.is_global_zero:
        starts, windows = trainer.datamodule.global_windows(step - 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"step": step, "starts": starts, "windows": windows}, path)
    return str(path)
