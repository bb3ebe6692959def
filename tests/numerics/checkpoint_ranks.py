"""What the tests of checkpoints do with real ranks. Run as a script, so that ranks fork from a process without threads.

python checkpoint_ranks.py FOLDER SCENARIO...    prints one JSON document: what each scenario found
"""

import importlib.util
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lit_gpt_dist.callbacks.signals import Agreement
from lit_gpt_dist.checkpoint import find, open_weights
from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.metadata import read_metadata
from lit_gpt_dist.checkpoint.saver import Job, SaveError, Saver
from lit_gpt_dist.checkpoint.tensors import share_out
from lit_gpt_dist.parallel.mesh import build_mesh

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_and_resume.py"
_spec = importlib.util.spec_from_file_location("kill_and_resume", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
runs = importlib.util.module_from_spec(_spec)
sys.modules["kill_and_resume"] = runs
_spec.loader.exec_module(runs)

LAYOUTS = [("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("fsdp2", 4), ("fsdp2", 3), ("hsdp", 4)]
ONE_WAY = (1, 2, 4)  # of seven layouts: between any two of them either this or its negative is the distance


def attempt(
    folder: Path, strategy: str, ranks: int, root: Path, steps: int, background: bool = False
) -> dict[int, float]:
    """Losses of a run that goes on from what ``root`` holds."""
    plan = runs.Plan(strategy, ranks, steps, every=10, folder=folder, save_in_background=background)
    log = folder / f"{root.name}.losses"
    log.unlink(missing_ok=True)
    codes = runs.wait(runs.start(plan, root, log, steps))
    assert not any(codes), "".join(path.read_text() for path in folder.glob(f"{root.name}-rank*.log"))
    return runs.read_losses(log)


def one_way(folder: Path) -> dict:
    """As ``matrix``, each two layouts in one direction."""
    return matrix(folder, ONE_WAY)


def matrix(folder: Path, distances: Sequence[int] = range(len(LAYOUTS))) -> dict:
    """Every layout saves after 10 steps, and others go on to 20 from it: worst difference to one device's run."""
    reference = attempt(folder, "single", 1, folder / "reference", 20)
    worst = {}
    for place, saver in enumerate(LAYOUTS):
        saved = folder / f"{saver[0]}{saver[1]}"
        attempt(folder, *saver, saved, 10)
        for loader in (LAYOUTS[(place + distance) % len(LAYOUTS)] for distance in distances):
            root = folder / "resumed"
            shutil.copytree(saved, root, symlinks=True)
            losses = attempt(folder, *loader, root, 20)
            shutil.rmtree(root)
            assert sorted(losses) == list(range(11, 21)), f"{saver} -> {loader} took steps {sorted(losses)}"
            difference = max(abs(loss - reference[step]) for step, loss in losses.items())
            worst[f"{saver[0]} {saver[1]} -> {loader[0]} {loader[1]}"] = difference
    return worst


def kills(folder: Path) -> dict:
    """The short form of ``scripts/kill_and_resume.py``."""
    import random

    outcomes = {}
    for strategy in ("ddp", "fsdp2"):
        plan = runs.Plan(strategy, 2, steps=60, every=5, folder=folder)
        outcomes[strategy] = runs.asdict(runs.torment(plan, 3, random.Random(7)))
    return outcomes


def background(folder: Path) -> dict:
    """Saved in the background and ended right after: is everything there, and equal to a run that saves at once?"""
    at_once = attempt(folder, "ddp", 2, folder / "at-once", 23)
    behind = attempt(folder, "ddp", 2, folder / "behind", 23, background=True)
    weights = [dict(open_weights(folder / name)[2]) for name in ("at-once", "behind")]
    return {
        "losses_equal": at_once == behind,
        "weights_equal": all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]),
        "steps": [found.manifest.step for found in find.list_checkpoints(folder / "behind") if found.manifest],
    }


def in_ranks(count: int, body) -> list[int]:
    """Exit codes of ``body(rank)`` in ``count`` forked ranks of a gloo group."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(count):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                store = f"tcp://127.0.0.1:{port}"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
                body(rank)
                dist.barrier()
                dist.destroy_process_group()
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        processes.append(process)
    return runs.wait(processes)


def job(folder: Path, step: int, megabytes: int = 2) -> Job:
    generator = torch.Generator().manual_seed(step)
    shared = {f"model.w{i}": torch.randn(megabytes << 15, generator=generator) for i in range(8)}
    path = folder / layout.FOLDER / layout.step_name(step)
    return Job(path, step, "a" * 32, json.dumps({"lightning": {}, "run_id": "a" * 32}), shared)


def disk_full(folder: Path) -> dict:
    """One rank of two can write no more in the middle of a save. (A limit on the size of files stands for the full disk.)"""

    def body(rank: int, in_background: bool) -> None:
        saver = Saver()
        saver.save(job(folder, 10), background=False)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
        try:
            saver.save(job(folder, 20), background=in_background)
            saver.wait()
            message = "no error"
        except SaveError as error:
            message = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        (folder / f"message-{in_background}-{rank}").write_text(message)

    codes = [in_ranks(2, lambda rank, b=b: body(rank, b)) for b in (False, True)]
    return {
        "codes": codes,
        "messages": sorted({path.read_text() for path in folder.glob("message-*")}),
        "told": len(list(folder.glob("message-*"))),
        "newest": find.newest_good(folder)[0].name,
        "left": sorted(path.name for path in (folder / layout.FOLDER).iterdir()),
    }


def shared_out(folder: Path) -> dict:
    """Three ranks hold the same tensors whole: who writes what?"""
    codes = in_ranks(3, lambda rank: Saver().save(job(folder, 10), background=False))
    checkpoint = find.newest_good(folder)[0]
    places = read_metadata(checkpoint).storage_data
    written: dict[str, int] = {}
    for place in places.values():
        rank = place.relative_path.split("_")[2]
        written[rank] = written.get(rank, 0) + place.length
    return {"codes": codes, "times_written": sorted(index.fqn for index in places), "bytes": sorted(written.values())}


def replicas(folder: Path) -> dict:
    """Four ranks in two groups, eight equal tensors in halves within each: which tensors does each rank write?"""

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", replicate=2, shard=2)
        placements = (Replicate(), Shard(0))
        tensors = {
            f"model.w{i}": distribute_tensor(torch.ones(6, 2), mesh, placements, src_data_rank=None) for i in range(8)
        }
        (folder / f"mine-{rank}").write_text(json.dumps(sorted(share_out(tensors, rank, 4))))

    codes = in_ranks(4, body)
    return {"codes": codes, "mine": [json.loads((folder / f"mine-{rank}").read_text()) for rank in range(4)]}


def agreement(folder: Path) -> dict:
    """Three ranks, one of which wants something from its fourth step on: with slow steps, then with fast ones."""

    def body(rank: int) -> None:
        heard = []
        for seconds, steps in ((0.02, 6), (0.0, 40)):
            talk = Agreement()
            answers = []
            for step in range(steps):
                time.sleep(seconds)
                answers.append(talk.exchange(2 if rank == 1 and step >= 3 else 0))
            heard.append([*answers, talk.finish()])
        (folder / f"heard-{rank}").write_text(json.dumps(heard))

    codes = in_ranks(3, body)
    heard = [json.loads((folder / f"heard-{rank}").read_text()) for rank in range(3)]
    return {"codes": codes, "slow": [of_rank[0] for of_rank in heard], "fast": [of_rank[1] for of_rank in heard]}


if __name__ == "__main__":
    found = {}
    for name in sys.argv[2:]:
        target = Path(sys.argv[1], name)
        target.mkdir()
        runs.corpus(target)
        found[name] = globals()[name](target)
    print(json.dumps(found))
