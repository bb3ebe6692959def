"""Reads profiler traces and flight-recorder dumps of a run: how much communication hides behind compute. Needs no device."""
