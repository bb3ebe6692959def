"""Kills training at random moments, half of them inside a save, and checks that every resume continues the same curve.

    python scripts/kill_and_resume.py --kills 100 --strategies ddp fsdp2 --ranks 2

Each attempt resumes from the newest whole checkpoint, logs the loss of every step, and gets SIGKILL: sometimes all ranks at
once, sometimes one and the others a moment later, as a launcher does. Its losses are held against an uninterrupted run of
the same layout; at the end the last attempt runs through, and its final weights are compared bit by bit.

Ranks are forked from a process that has imported everything, which spares each of them the start-up. CPU and gloo only.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback
from lit_gpt_dist.callbacks.signals import SignalCallback
from lit_gpt_dist.checkpoint import find, open_weights
from lit_gpt_dist.data.datamodule import GPTDataModule
from lit_gpt_dist.module import GPTModule
from lit_gpt_dist.optim.config import OptimConfig
from lit_gpt_dist.parallel import HSDP
from lit_gpt_dist.trainer import Trainer

TOLERANCE = 1e-6
PATIENCE_SECONDS = 120  # for an attempt to begin training


@dataclass
class Plan:
    """One layout and how it is tormented."""

    strategy: str
    ranks: int
    steps: int
    every: int
    folder: Path
    save_in_background: bool = False

    def root(self, name: str) -> Path:
        return self.folder / f"{self.strategy}{self.ranks}-{name}"


@dataclass
class Outcome:
    kills: int = 0
    kills_inside_a_save: int = 0  # a temporary folder was left behind
    resumes_compared: int = 0
    steps_compared: int = 0
    worst_difference: float = 0.0
    steps_not_bitwise_equal: int = 0
    damaged_checkpoints_seen: int = 0  # committed ones that do not verify: must stay 0
    restarts_from_zero: int = 0  # killed before the first commit
    final_weights_equal: bool | None = None
    resumed_from: list[int] = field(default_factory=list)


class LossLog(Callback):
    """One line a step, written through at once: a killed process must leave what it knew."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = trainer.strategy.reduce(module.step_loss.clone(), reduce_op="mean").item()
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(f"{trainer.global_step} {loss!r}\n")


def corpus(folder: Path) -> Path:
    """Text of 37 different characters: a vocabulary that no number of ranks from 2 to 4 divides."""
    path = folder / "corpus.txt"
    letters = "abcdefghijklmnopqrstuvwxyz0123456789\n"
    path.write_text("".join(random.Random(0).choices(letters, k=20_000)))
    return path


def work(plan: Plan, root: Path, log: Path, steps: int) -> None:
    """One rank of one attempt."""
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=plan.ranks,
        # gathered at once, so that both ways to shard exchange checkpoints
        strategy=HSDP(shard_ranks=plan.ranks // 2, units="model") if plan.strategy == "hsdp" else plan.strategy,
        max_steps=steps,
        default_root_dir=root,
        callbacks=[
            LossLog(log),
            CheckpointCallback(every_n_steps=plan.every, keep_last=2, async_save=plan.save_in_background),
            SignalCallback(),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        max_epochs=-1,
    )
    data = GPTDataModule(
        str(plan.folder / "corpus.txt"), tokenizer="char", global_batch=12, micro_batch=12 // plan.ranks, val_fraction=0
    )
    optim = OptimConfig(schedule_steps=1_000)  # the same learning rates however far an attempt is to go
    module = GPTModule(size="tiny", width=32, context=16, optim=optim)
    trainer.fit(module, data, ckpt_path=find.resolve("last", root))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def start(plan: Plan, root: Path, log: Path, steps: int) -> list[int]:
    """Process ids of the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [_fork(plan, root, log, steps, rank, port) for rank in range(plan.ranks)]


def _fork(plan: Plan, root: Path, log: Path, steps: int, rank: int, port: int) -> int:
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    output = os.open(root.parent / f"{root.name}-rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
        os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(plan.ranks)}
        work(plan, root, log, steps)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(processes: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


def kill(processes: list[int], dice: random.Random) -> None:
    """All at once, or one first and the others when a launcher would have noticed."""
    if dice.random() < 0.5:
        first = dice.choice(processes)
        os.kill(first, signal.SIGKILL)
        time.sleep(dice.uniform(0, 0.1))
    for process in processes:
        os.kill(process, signal.SIGKILL)  # a dead child not yet waited for takes it quietly
    for process in processes:
        os.waitpid(process, 0)


def read_losses(log: Path) -> dict[int, float]:
    """Loss by step; a last line that the kill cut off is left out."""
    text = log.read_text() if log.exists() else ""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {int(step): float(loss) for step, loss in lines}


def wait_for(condition: Any, processes: list[int], seconds: float, poll_seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or os.waitpid(processes[0], os.WNOHANG)[0]:
            return False
        time.sleep(poll_seconds)
    return True


def unfinished(folder: Path) -> set[Path]:
    """Folders of saves that are under way, or were when they were killed."""
    return set(folder.glob(".tmp-*step-*"))


def torment(plan: Plan, kills: int, dice: random.Random) -> Outcome:
    """The reference, then attempt after attempt until there were ``kills``, then one to the end."""
    outcome = Outcome()
    reference_root, root = plan.root("reference"), plan.root("killed")
    reference_log = plan.folder / "reference.losses"
    reference_log.unlink(missing_ok=True)
    codes = wait(start(plan, reference_root, reference_log, plan.steps))
    if any(codes):
        raise SystemExit(
            f"the uninterrupted run failed: {(plan.folder / f'{reference_root.name}-rank0.log').read_text()}"
        )
    reference = read_losses(reference_log)
    while outcome.kills < kills:
        log = plan.folder / f"attempt-{outcome.kills}.losses"
        processes = start(plan, root, log, plan.steps)
        inside = outcome.kills % 2 == 0
        if not _wait_for_moment(root, log, processes, inside, dice):
            codes = wait(processes[1:])
            _compare(log, reference, outcome)
            if any(codes):  # none of them: the kill before came after the last step, and nothing was left to do
                raise SystemExit(f"an attempt failed: {(plan.folder / f'{root.name}-rank0.log').read_text()}")
            shutil.rmtree(root)  # it ran through to the end: begin again
            continue
        kill(processes, dice)
        outcome.kills += 1
        outcome.kills_inside_a_save += bool(unfinished(root / "checkpoints"))
        _inspect(root, outcome)
        _compare(log, reference, outcome)
    codes = wait(start(plan, root, plan.folder / "final.losses", plan.steps))
    if any(codes):
        raise SystemExit(f"the last attempt failed: {(plan.folder / f'{root.name}-rank0.log').read_text()}")
    _compare(plan.folder / "final.losses", reference, outcome)
    ours, theirs = dict(open_weights(root)[2]), dict(open_weights(reference_root)[2])
    outcome.final_weights_equal = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return outcome


def _wait_for_moment(root: Path, log: Path, processes: list[int], inside: bool, dice: random.Random) -> bool:
    """Sleeps until the moment to kill. False if the attempt ended by itself."""
    if not wait_for(log.exists, processes, PATIENCE_SECONDS, 0.005):
        return False
    if not inside:
        time.sleep(dice.uniform(0, 1.0))
        return True
    folder = root / "checkpoints"
    seen: set[Path] = set()
    for _ in range(dice.randint(1, 4)):  # not always the first save of an attempt
        known = frozenset(seen)
        if not wait_for(lambda known=known: unfinished(folder) - known, processes, PATIENCE_SECONDS, 0.0005):
            return False
        seen |= unfinished(folder)
    time.sleep(dice.uniform(0, 0.015))
    return True


def _inspect(root: Path, outcome: Outcome) -> None:
    """Everything that carries a checkpoint's name must be whole at any moment."""
    for found in find.list_checkpoints(root):
        try:
            find.verify(found.path)
        except find.DamagedError as error:
            print(f"DAMAGED: {found.path}: {error}")
            outcome.damaged_checkpoints_seen += 1


def _compare(log: Path, reference: dict[int, float], outcome: Outcome) -> None:
    losses = read_losses(log)
    if not losses:
        return
    first = min(losses) - 1
    outcome.resumed_from.append(first)
    outcome.restarts_from_zero += first == 0
    outcome.resumes_compared += 1
    outcome.steps_compared += len(losses)
    for step, loss in losses.items():
        outcome.worst_difference = max(outcome.worst_difference, abs(loss - reference[step]))
        outcome.steps_not_bitwise_equal += loss != reference[step]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="over all strategies together")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400, help="length of the run")
    parser.add_argument("--every", type=int, default=5, help="steps between saves")
    parser.add_argument("--background", action="store_true", help="save in the background")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="where to write the outcome as JSON")
    options = parser.parse_args(argv)
    outcomes: dict[str, dict] = {}
    for strategy in options.strategies:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            corpus(folder)
            plan = Plan(strategy, options.ranks, options.steps, options.every, folder, options.background)
            outcome = torment(plan, options.kills // len(options.strategies), random.Random(options.seed))
        outcomes[f"{strategy} {options.ranks}"] = asdict(outcome)
        print(strategy, {key: value for key, value in asdict(outcome).items() if key != "resumed_from"})
        print(f"  resumed from steps {outcome.resumed_from} (median {statistics.median(outcome.resumed_from)})")
    if options.out:
        options.out.write_text(json.dumps(outcomes, indent=1) + "\n")
    good = all(o["worst_difference"] <= TOLERANCE and not o["damaged_checkpoints_seen"] for o in outcomes.values())
    print("every resume continued the curve" if good else "NOT every resume continued the curve")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
