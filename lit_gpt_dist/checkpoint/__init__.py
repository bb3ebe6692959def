"""Checkpoints: written by all ranks, committed by one rename, read by any layout; exports and imports of plain weights."""

from lit_gpt_dist.checkpoint.sources import open_weights

__all__ = ["open_weights"]
