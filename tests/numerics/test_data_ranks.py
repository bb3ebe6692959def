"""Claims about data that need real processes: Lightning's Trainer on gloo, and memory per process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lit_gpt_dist.data.corpus import ContentDigest
from lit_gpt_dist.data.tokenizers import CharVocabulary

RUN = '''
"""A run of a model without mathematics: it notes the windows that it is given. Arguments: a JSON object."""
import hashlib, json, sys
from pathlib import Path
import lightning, torch
from lightning.pytorch.strategies import DDPStrategy
from lit_gpt_dist.data.datamodule import GPTDataModule
from lit_gpt_dist.errors import UserError

options = json.loads(sys.argv[1])


class Notes(lightning.LightningModule):
    context = 16

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.steps, self.sums, self.result = {}, torch.zeros(2, dtype=torch.float64), None

    def training_step(self, windows, index):
        assert windows.shape[1:] == (options["micro"], 17)
        hashes = [hashlib.sha256(w.numpy().tobytes()).hexdigest()[:16] for w in windows.flatten(0, 1)]
        assert self.global_step not in self.steps
        self.steps[self.global_step] = hashes
        return self.weight.sum() * 0

    def on_validation_epoch_start(self):
        self.sums.zero_()

    def validation_step(self, batch, index):
        loss = (batch.windows.double() ** 2).mean(1)  # stands for the loss of a window; whole numbers sum exactly
        self.sums += torch.stack([(loss * 17 * batch.weights).sum(), batch.weights.sum().double()])

    def on_validation_epoch_end(self):
        gathered = self.all_gather(self.sums).reshape(-1, 2).sum(0)
        self.result = (gathered[0] / gathered[1]).item()

    def configure_optimizers(self):
        self.trainer.estimated_stepping_batches  # builds the loader before the checkpoint tells its step
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Twins(DDPStrategy):
    data_rank, data_ranks = 0, 2  # a strategy that is wrong about its ranks


ranks, strategy = options["ranks"], "auto"
if ranks > 1:
    strategy = Twins() if options.get("twins") else DDPStrategy()
trainer = lightning.Trainer(
    accelerator="cpu", devices=ranks, strategy=strategy, max_steps=options["steps"], logger=False, val_check_interval=2,
    num_sanity_val_steps=1, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    limit_val_batches=1.0, log_every_n_steps=1,
    accumulate_grad_batches=options.get("accumulate", 1),
)
module = Notes()
data = GPTDataModule(options["corpus"], global_batch=options.get("global"), micro_batch=options["micro"],
                     workers=options.get("workers"), val_micro_batch=3)
notes = {}
try:
    trainer.fit(module, datamodule=data, ckpt_path=options.get("resume"), weights_only=True)
    trainer.save_checkpoint(options["save"])
    notes = {"steps": module.steps, "validation": module.result, "plan": str(data.plan),
             "accumulate_grad_batches": trainer.accumulate_grad_batches}
except UserError as error:
    notes = {"error": str(error)}
Path(options["notes"] + str(trainer.global_rank)).write_text(json.dumps(notes))
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
'''

MEMORY = '''
"""Each of two processes reads windows all over a shard, with worker processes; prints what they hold privately, in MiB."""
import itertools, multiprocessing, re, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from lit_gpt_dist.data.datamodule import GPTDataModule


def private_mib(pid):
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def read(rank, corpus, results):
    strategy = SimpleNamespace(root_device=torch.device("cpu"), all_gather=lambda tensor: tensor, data_rank=0, data_ranks=1)
    data = GPTDataModule(corpus, micro_batch=8, seed=rank, workers=2)
    data.trainer = SimpleNamespace(strategy=strategy, lightning_module=SimpleNamespace(context=64), accumulate_grad_batches=1,
                                   overfit_batches=0, global_rank=rank, world_size=1, global_step=0)
    before = private_mib("self")
    data.setup("fit")
    batches = iter(data.train_dataloader())
    for batch in itertools.islice(batches, 300):
        pass
    for starts in data.val_dataloader():
        data.transfer_batch_to_device(starts, torch.device("cpu"), 0)
    workers = [private_mib(child.pid) for child in multiprocessing.active_children()]
    assert len(workers) == 2
    results.put([private_mib("self") - before, *(w - before for w in workers)])


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=read, args=(rank, sys.argv[1], results)) for rank in range(2)]
    for process in processes:
        process.start()
    print([results.get(timeout=100) for _ in processes])
    for process in processes:
        process.join(30)
'''


def run_script(tmp_path: Path, script: str, argument: str, timeout: int = 120) -> str:
    """Runs it in its own process group; whatever of the group is left at the end is killed."""
    path = tmp_path / "script.py"
    path.write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, str(path), argument],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    numbers = np.random.default_rng(0).integers(0, 26, 4000)
    path.write_text("".join(chr(97 + n) for n in numbers))
    return str(path)


def run(tmp_path, corpus, name, ranks, **options):
    """Notes of all ranks of one run."""
    place = tmp_path / name
    place.mkdir()
    arguments = {
        "corpus": corpus,
        "ranks": ranks,
        "save": str(place / "ckpt"),
        "notes": str(place / "notes"),
        **options,
    }
    run_script(place, RUN, json.dumps(arguments))
    return [json.loads((place / f"notes{rank}").read_text()) for rank in range(ranks)]


def windows_of_steps(notes):
    """What all ranks together took in each step, in no order."""
    steps = notes[0]["steps"].keys()
    assert all(note["steps"].keys() == steps for note in notes)
    return {step: sorted(w for note in notes for w in note["steps"][step]) for step in steps}


@pytest.mark.timeout(200)
def test_lightning_trains_on_the_same_windows_after_a_resume_on_other_ranks(tmp_path, corpus):
    alone = run(tmp_path, corpus, "alone", 1, steps=6, micro=2, **{"global": 8})
    two = run(tmp_path, corpus, "two", 2, steps=3, micro=2, accumulate=2, workers=2)
    resumed = run(tmp_path, corpus, "on", 1, steps=6, micro=4, **{"global": 8}, resume=f"{tmp_path}/two/ckpt")
    assert two[0]["plan"] == "global batch 8 = micro 2 × accumulate 2 × 2 data ranks"
    assert two[0]["accumulate_grad_batches"] == 1
    straight = windows_of_steps(alone)
    assert list(straight) == [str(step) for step in range(6)]
    assert {**windows_of_steps(two), **windows_of_steps(resumed)} == straight
    assert list(windows_of_steps(resumed)) == ["3", "4", "5"]
    # sums of whole numbers in float64: exact, whatever the order
    assert {note["validation"] for note in (*alone, *two, *resumed)} == {alone[0]["validation"]}


@pytest.mark.timeout(120)
def test_ranks_that_would_train_on_the_same_windows_are_all_stopped(tmp_path, corpus):
    notes = run(tmp_path, corpus, "twins", 2, steps=3, micro=2, twins=True)
    assert len({note["error"] for note in notes}) == 1
    assert "2 data ranks are planned, but only 1 are there" in notes[0]["error"]


def large_corpus(folder: Path, tokens: int) -> str:
    """A prepared corpus of zeros; the file is sparse, so it takes no room on the disk."""
    vocabulary = CharVocabulary("ab")
    with (folder / "tokens-00000.bin").open("wb") as file:
        file.truncate(2 * tokens)
    facts = {
        "version": 1,
        "dtype": "<u2",
        "digest": ContentDigest(vocabulary).hexdigest(),
        "vocabulary_digest": vocabulary.digest,
        "shards": [{"file": "tokens-00000.bin", "tokens": tokens}],
        "dropped_characters": {},
    }
    (folder / "corpus.json").write_text(json.dumps(facts))
    (folder / "vocabulary.json").write_text(vocabulary.to_json())
    return str(folder)


@pytest.mark.timeout(150)
def test_a_256_mb_shard_stays_mapped_in_every_process_and_worker(tmp_path):
    (tmp_path / "corpus").mkdir()
    output = run_script(tmp_path, MEMORY, large_corpus(tmp_path / "corpus", 128 << 20))
    grown_mib = np.array(json.loads(output.strip().splitlines()[-1]))
    assert grown_mib.shape == (2, 3)  # each process and its two workers
    # loaders and their queues take some MiB; a copy of the shard would take 256
    assert grown_mib.max() < 64, grown_mib
