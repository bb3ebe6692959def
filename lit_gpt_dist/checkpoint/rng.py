"""The states of the random number generators of one rank, as tensors. Knows nothing of files."""

import random

import numpy as np
import torch
from torch import Tensor


def collect(rank: int, device: torch.device) -> dict[str, Tensor]:
    """States of torch (CPU, and this rank's GPU), NumPy and Python, under keys of this rank."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    states = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),  # type: ignore[union-attr]
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {f"rng.{rank}.{name}": state for name, state in states.items()}


def restore(states: dict[str, Tensor], device: torch.device) -> None:
    """Puts the states of one rank back; the names are those of ``collect`` without ``rng.RANK.``."""
    torch.set_rng_state(states["cpu"])
    version, *words = states["python"].tolist()
    gauss = states["python_gauss"].item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    *keys, position, has_gauss = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, states["numpy_gauss"].item()))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
