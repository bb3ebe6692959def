"""Which callbacks ``--monitor`` and ``--profile`` come to, and in which order they must stand."""

import lightning.pytorch as pl

from lit_gpt_dist.callbacks.compiling import CompileTime
from lit_gpt_dist.callbacks.dashboard import Dashboard
from lit_gpt_dist.callbacks.guard import BadStepGuard
from lit_gpt_dist.callbacks.hangs import HangWatch
from lit_gpt_dist.callbacks.learning import LearningPart
from lit_gpt_dist.callbacks.memory import MemoryPart
from lit_gpt_dist.callbacks.oom import OutOfMemory
from lit_gpt_dist.callbacks.options import MonitorOptions
from lit_gpt_dist.callbacks.phases import PhaseSampler
from lit_gpt_dist.callbacks.profiler import StepProfiler
from lit_gpt_dist.callbacks.reading import Part
from lit_gpt_dist.callbacks.recorder import StepRecorder


def watching(options: MonitorOptions, profile: str | None = None) -> list[pl.Callback]:
    """The callbacks of a run, to stand in front of all others.

    In this order: what marks the end of a step, the recorder that reads, the guard that judges what was read. Checkpoints
    come after, so that nothing is saved behind a bad step.
    """
    profiler: list[pl.Callback] = [StepProfiler(profile)] if profile else []
    if not options.enabled:
        return [StepRecorder(options.window), *profiler]
    parts: list[Part] = []
    marks: list[pl.Callback] = []
    if options.memory:
        parts.append(MemoryPart())
    if options.learning:
        parts.append(LearningPart())
    if options.sample_every:
        phases = PhaseSampler(options.sample_every)
        marks.append(phases)
        parts.append(phases)
    if options.hang_watch:
        marks.insert(0, HangWatch())
    found = [*marks, StepRecorder(options.window, parts)]
    if options.on_bad_step != "ignore":
        found.append(
            BadStepGuard(options.on_bad_step, options.spike_factor, options.rollback_skip_steps, options.max_rollbacks)
        )
    return [*found, CompileTime(), OutOfMemory(options.memory_snapshot), Dashboard(options.sample_tokens), *profiler]
