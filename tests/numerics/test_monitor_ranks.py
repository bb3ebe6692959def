"""Claims about what is watched that need real ranks: the same numbers under every layout, equal weights after a bad step."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = '''
"""One rank's Trainer. Arguments: a JSON object. Rank 0 writes what was logged; every rank a digest of its whole weights."""
import hashlib, json, os, sys
from pathlib import Path
import torch
from lightning.pytorch.loggers import Logger
from torch.distributed.tensor import DTensor
from lit_gpt_dist.callbacks.monitor import watching
from lit_gpt_dist.callbacks.options import MonitorOptions
from lit_gpt_dist.data.datamodule import GPTDataModule
from lit_gpt_dist.module import GPTModule
from lit_gpt_dist.trainer import Trainer

options = json.loads(sys.argv[1])


class Notes(Logger):
    name, version = "notes", 0

    def __init__(self):
        super().__init__()
        self.rows = {}

    def log_metrics(self, metrics, step=None):
        self.rows.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass


class Poisoned(GPTModule):
    def _micro_loss(self, windows, index):
        loss = super()._micro_loss(windows, index)
        bad = self.trainer.global_step + 1 == options.get("nan_step") and self.trainer.global_rank == self.trainer.world_size - 1
        return loss * float("nan") if bad else loss


notes = Notes()
callbacks = watching(MonitorOptions(on_bad_step=options.get("policy", "stop"), sample_every=2, sample_tokens=0))
trainer = Trainer(
    accelerator="cpu", devices=options["ranks"], strategy=options["strategy"], max_steps=options["steps"], max_epochs=-1,
    logger=[notes], enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, log_every_n_steps=4,
    gradient_clip_val=1.0, limit_val_batches=0, use_distributed_sampler=False, default_root_dir=options["folder"],
    callbacks=callbacks, num_sanity_val_steps=0,
)
data = GPTDataModule(options["corpus"], global_batch=8, micro_batch=8 // options["ranks"] // options.get("accumulate", 1))
module = Poisoned("tiny", layers=2, width=32, heads=2, context=32)
trainer.fit(module, datamodule=data)
full = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in full)).hexdigest()
finite = all(bool(torch.isfinite(p).all()) for p in full)
out = {"digest": digest, "finite": finite, "rows": notes.rows, "losses": next(iter(c.losses for c in callbacks if hasattr(c, "losses")))}
Path(options["folder"], f"rank-{trainer.global_rank}.json").write_text(json.dumps(out))
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads can abort a process that is ending, when all is written
'''


def run(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """What each rank wrote."""
    folder.mkdir()
    (folder / "run.py").write_text(RUN)
    (folder / "corpus.txt").write_text("".join(f"{number} {number**2}\n" for number in range(4000)))
    given = {"folder": str(folder), "corpus": str(folder / "corpus.txt"), "steps": 8, **options}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(folder / "run.py"), json.dumps(given)], env=environment, capture_output=True, text=True, timeout=150
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(options["ranks"])]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """What one process logged, by step."""
    return run(tmp_path_factory.mktemp("single") / "run", ranks=1, strategy="single")[0]["rows"]


@pytest.mark.parametrize(("strategy", "accumulate"), [("ddp", 1), ("fsdp2", 2)])
def test_layouts_log_the_same_numbers_and_a_skipped_step_leaves_all_ranks_with_the_same_finite_weights(
    tmp_path: Path, single: dict[str, dict[str, float]], strategy: str, accumulate: int
) -> None:
    ranks = run(tmp_path / "run", ranks=2, strategy=strategy, accumulate=accumulate, policy="skip", nan_step=7)
    rows = ranks[0]["rows"]
    assert list(rows) == list(single) == ["4", "8"]
    for name in ("train/loss", "health/grad_norm", "train/update_ratio"):
        # before the bad step; fp32 sums in another order, and the ratio divides by the root of squares near eps
        assert rows["4"][name] == pytest.approx(single["4"][name], rel=1e-6 if "ratio" not in name else 1e-5), name
    assert all(rank["finite"] for rank in ranks)
    assert len({rank["digest"] for rank in ranks}) == 1
    assert rows["8"]["health/skipped_steps"] == 1
    assert [step for step, loss in enumerate(ranks[0]["losses"], start=1) if loss != loss] == [7]
