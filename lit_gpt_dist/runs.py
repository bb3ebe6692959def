"""A run's name, and the processes of a run: how each ends without leaving others behind. Knows nothing of training."""

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed

from lit_gpt_dist.checkpoint.saver import SaveError
from lit_gpt_dist.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER_ERROR, RanksMissing, RunStopped, UserError

# what gloo and NCCL say on the ranks that were talking to one that ended: never the cause
LOST_PARTNER = re.compile(r"Connection (reset|closed) by peer|Broken pipe|remote process (exited|has terminated)")
PARENT_VARIABLE = "LIT_GPT_DIST_PARENT"  # tells them which process started them: it may end while they import
RUN_VARIABLE = "LIT_GPT_DIST_RUN"  # tells the processes that Lightning starts which name the first one chose


def global_rank() -> int:
    """This process's rank, from the process group or what a launcher left in the environment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def name_run(root: Path, tag: str, size: str) -> tuple[str, bool]:
    """A folder name under ``root`` that no run has: the tag, or the size and the time; and whether it is new.

    The first process makes the folder, so that no other run takes the name meanwhile. Ranks of a launcher all choose at once,
    and must come to the same.
    """
    if os.environ.get(RUN_VARIABLE):
        return os.environ[RUN_VARIABLE], False
    base = tag or f"{size}-{launched():%Y%m%d-%H%M%S}"
    name, number = base, 1
    alone = os.environ.get("WORLD_SIZE", "1") == "1" and os.environ.get("SLURM_NTASKS", "1") == "1"
    while not (reserved(root / name) if alone else not (root / name).exists()):
        number += 1
        name = f"{base}-{number}"
    os.environ[RUN_VARIABLE] = name
    return name, True


def launched() -> datetime:
    """When torchrun started, which its ranks of a machine agree on however long each took to come here; else now."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        try:  # proc(5): the 22nd field, in ticks since the machine started
            ticks = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
            started = re.search(r"^btime (\d+)", Path("/proc/stat").read_text(), re.MULTILINE)
            return datetime.fromtimestamp(int(started[1]) + int(ticks) / os.sysconf("SC_CLK_TCK"))  # type: ignore[index]
        except (OSError, ValueError, IndexError, TypeError):
            pass  # no Linux
    return datetime.now()


def reserved(folder: Path) -> bool:
    """Makes ``folder``, if nobody else has."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if not os.path.lexists(folder):  # something above it is no folder
            raise
        return False
    return True


def started_by_lightning() -> bool:
    """Whether this process is a rank that the first one started (torchrun and srun look after theirs themselves)."""
    return (
        os.environ.get("LOCAL_RANK", "0") != "0"
        and "TORCHELASTIC_RUN_ID" not in os.environ
        and "SLURM_PROCID" not in os.environ
    )


def end_with_parent() -> None:
    """In a rank that Lightning started: end when the process that started it is gone, however it went, and be it before now."""
    if not started_by_lightning():
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        return
    parent = os.environ.get(PARENT_VARIABLE, str(os.getppid()))

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(1)
        os._exit(EXIT_FAILURE)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def follow_launcher(trainer: Any) -> None:
    """Ranks that torchrun or a hand has started say how many they are, where ``--trainer.devices`` and ``num_nodes`` are left out."""
    here, all_of_them = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if trainer.devices == "auto" and here.isdigit() and all_of_them.isdigit() and int(here) > 0:
        trainer.devices = int(here)
        if trainer.num_nodes == 1:
            trainer.num_nodes = max(1, int(all_of_them) // int(here))


def first_of_machine() -> bool:
    """As torchrun, Lightning or Slurm counts."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def run_rank(body: Callable[[], int], children: Callable[[], list]) -> int:
    """Runs ``body`` as one rank of perhaps many, and ends so that no other rank waits for this one.

    A user's mistake is the same on all ranks, and rank 0 tells it. Any other error is told by the rank it happened on:
    where another rank died first, rank 0 says so instead of showing the broken connection that followed from it.

    Args:
        children: the processes that this one has started.
    """
    end_with_parent()
    try:
        code = body()
        leave_together(children())
        return code
    except RunStopped as stopped:  # on every rank, after the same step, with everything saved
        leave_together(children())
        # of a rank that Lightning started, its observer would take any other code for a failure, and kill rank 0
        return EXIT_OK if started_by_lightning() else stopped.exit_code
    except UserError as mistake:
        if global_rank() == 0 or isinstance(mistake, RanksMissing):
            wait_for(children())
            raise
        code = EXIT_USER_ERROR
    except SaveError as failed:  # on every rank alike, with all that there is to say
        code = EXIT_FAILURE
        if global_rank() == 0:
            dead = dead_child(children()) if LOST_PARTNER.search(str(failed)) else None
            told = describe_end(*dead) if dead else failed
            print(f"error: {told}; training ended, earlier checkpoints stand (--ckpt_path last)", file=sys.stderr)
    except Exception as error:
        code = EXIT_FAILURE
        first_dead = dead_child(children()) if global_rank() == 0 else None
        if first_dead is not None:
            print(f"error: {describe_end(*first_dead)}", file=sys.stderr)
        elif lost := LOST_PARTNER.search(str(error)):
            print(f"error on rank {global_rank()}: another rank has ended ({lost[0]})", file=sys.stderr)
        else:
            print(f"error on rank {global_rank()}:\n{traceback.format_exc()}", file=sys.stderr)
    finally:
        stop(children())
    if not torch.distributed.is_initialized():
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process group that broke would wait for its partners at exit


def dead_child(children: list, patience_seconds: float = 3) -> tuple[int, int] | None:
    """(rank, exit code) of a started process that has failed, or None if none does within the time."""
    deadline = time.monotonic() + patience_seconds
    while children:
        for index, child in enumerate(children):
            if child.poll():
                return index + 1, child.returncode
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return None


def describe_end(rank: int, code: int) -> str:
    """Of a process that failed; one that a signal ended has told nothing itself."""
    if code >= 0:
        return f"rank {rank} ended with exit code {code}; see its message above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; often the system's, out of memory" if name == "SIGKILL" else ""
    return f"rank {rank} was killed by {name}{hint}"


def wait_for(children: list, patience_seconds: float = 3) -> None:
    """Gives processes that end by themselves the time to."""
    deadline = time.monotonic() + patience_seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)


def stop(children: list) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()


def leave_together(children: list) -> None:
    """The end of a run that went well. Rank 0 waits for the processes it started: whoever kills one of them while it
    ends makes Lightning's observer believe that it failed, and that kills everybody."""
    leave_process_group()
    wait_for(children, patience_seconds=30)


def leave_process_group() -> None:
    """A barrier, then the end of the process group: without it a gloo process can abort after it has succeeded."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
