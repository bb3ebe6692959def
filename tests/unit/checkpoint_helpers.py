"""Checkpoints for tests, written by one process without a Trainer."""

import json
import time
from pathlib import Path

import torch

from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.saver import Job, Saver
from lit_gpt_dist.checkpoint.tensors import MODEL
from lit_gpt_dist.model.config import GPTConfig
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.model.init import initialize

VOCABULARY = {"kind": "byte"}


def small_gpt(seed: int = 1, **shape) -> GPT:
    """A GPT of a few thousand weights, none of them special (norms and biases included)."""
    model = GPT(GPTConfig(**{"layers": 2, "heads": 2, "width": 16, "context": 12, "vocab_size": 37, **shape}))
    initialize(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def write_checkpoint(
    root: Path, step: int, run_id: str = "a" * 32, model: GPT | None = None, val_loss=None, **facts
) -> Path:
    model = model or small_gpt()
    document = {
        "format": layout.FORMAT,
        "run_id": run_id,
        "model": model.config.to_dict(),
        "vocabulary": {"document": json.dumps(VOCABULARY), "digest": "d", "size": 256, "kind": "byte"},
        "lightning": {"global_step": step},
        **facts,
    }
    committed: list[Path] = []
    job = Job(
        path=root / layout.FOLDER / layout.step_name(step),
        step=step,
        run_id=run_id,
        state_json=json.dumps(document),
        shared={MODEL + name: parameter for name, parameter in model.named_parameters()},
        val_loss=val_loss,
        after_commit=committed.append,
    )
    Saver().save(job, background=False)
    layout.point_last(committed[0])
    time.sleep(0.002)  # commits are told apart by their time
    return committed[0]
