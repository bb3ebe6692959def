"""Checkpoints: written by all ranks, committed by one rename, read by any layout; exports and imports of plain weights."""
