"""Data that a rollback passed over stay passed over."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_gpt_dist.data.datamodule import GPTDataModule

CPU = torch.device("cpu")


@pytest.fixture
def data(tmp_path: Path) -> GPTDataModule:
    (tmp_path / "text.txt").write_text("".join(chr(97 + i * (i // 7) % 23) for i in range(3000)))
    module = GPTDataModule(str(tmp_path / "text.txt"), micro_batch=4)
    module.trainer = trainer_at(0)
    module.setup("fit")
    return module


def trainer_at(step: int) -> Any:
    strategy = SimpleNamespace(root_device=CPU, all_gather=lambda tensor: tensor)
    return SimpleNamespace(
        strategy=strategy, lightning_module=SimpleNamespace(context=16), accumulate_grad_batches=1, overfit_batches=0.0, global_rank=0, state=SimpleNamespace(fn="fit"),
        world_size=1, global_step=step,
    )  # fmt: skip


def windows(data: GPTDataModule, steps: int) -> list[torch.Tensor]:
    """Of consecutive steps, as a Trainer fetches them: always one ahead."""
    batches, found = iter(data.train_dataloader()), []
    ahead = next(batches)
    for _ in range(steps):
        batch, ahead = ahead, next(batches)
        found.append(data.transfer_batch_to_device(batch, CPU, 0))
        data.trainer.global_step += 1  # type: ignore[union-attr, misc]
    return found


def test_an_offset_shifts_the_windows_by_so_many_steps(data: GPTDataModule) -> None:
    plain = windows(data, 5)
    data.trainer, data.data_offset = trainer_at(0), 2
    assert all(torch.equal(shifted, later) for shifted, later in zip(windows(data, 3), plain[2:], strict=True))


def test_an_offset_that_changes_while_training_takes_effect_at_the_next_step(data: GPTDataModule) -> None:
    plain = windows(data, 5)
    data.trainer = trainer_at(0)
    batches = iter(data.train_dataloader())
    data.transfer_batch_to_device(next(batches), CPU, 0)
    data.trainer.global_step = 1
    read_ahead = next(batches)
    data.data_offset = 2
    assert torch.equal(data.transfer_batch_to_device(read_ahead, CPU, 0), plain[3])
    data.trainer.global_step = 2
    assert torch.equal(data.transfer_batch_to_device(next(batches), CPU, 0), plain[4])


def test_a_resume_keeps_the_offset(data: GPTDataModule) -> None:
    data.data_offset = 3
    state = data.state_dict()
    data.data_offset = 0
    data.load_state_dict(state)
    assert data.data_offset == 3
    data.load_state_dict({key: value for key, value in state.items() if key != "data_offset"})  # of an older checkpoint
    assert data.data_offset == 0


def test_a_step_of_all_ranks_together_can_be_looked_at(data: GPTDataModule) -> None:
    data.data_offset = 1
    starts, tokens = data.global_windows(4)
    assert starts.shape == (4,)
    data.trainer = trainer_at(4)
    assert torch.equal(tokens.long(), windows(data, 1)[0].flatten(0, 1))
