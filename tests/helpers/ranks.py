"""Runs a function on several gloo ranks, each a process, and gives back what each returned. Knows nothing of training.

The ranks are forked from a server that has imported the libraries once, and meet through a file: no port, and a start
that costs milliseconds instead of seconds.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOADED = ["torch", "torch.distributed.fsdp", "lightning.pytorch.cli", "lit_gpt_dist.fit"]


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 150) -> list[Any]:
    """``function(*arguments)`` on ``world`` ranks at once; what each rank returned, in order.

    Raises:
        AssertionError: a rank failed or did not end in time; with the traceback of the first that failed. No rank is
            left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank_main, args=(rank, world, folder, function, arguments), daemon=True)
            for rank in range(world)
        ]
        try:
            for rank in ranks:
                rank.start()
            _wait(ranks, Path(folder), time.monotonic() + timeout_seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world)]


def _wait(ranks: list, folder: Path, deadline: float) -> None:
    while any(rank.exitcode is None for rank in ranks):
        assert not (failed := _failures(ranks, folder)), failed
        assert time.monotonic() < deadline, f"ranks {[i for i, r in enumerate(ranks) if r.exitcode is None]} hang"
        time.sleep(0.02)
    assert not (failed := _failures(ranks, folder)), failed


def _failures(ranks: list, folder: Path) -> str:
    """What the failed ranks said; nothing where none has failed. Consequences of another's end come last."""
    if not any(rank.exitcode for rank in ranks):
        return ""
    time.sleep(0.5)  # let the others say why they ended, too
    told = sorted(folder.glob("error-*"), key=lambda file: file.stat().st_mtime_ns)
    return "\n".join(file.read_text() for file in told) or f"exit codes {[rank.exitcode for rank in ranks]}"


def _rank_main(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # never used: the process group is there before Lightning looks for one
        "TORCHELASTIC_RUN_ID": "tests",  # so that Lightning takes the ranks as they are and starts none
    }
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        result = function(*arguments)
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)  # a broken group would wait for its partners
