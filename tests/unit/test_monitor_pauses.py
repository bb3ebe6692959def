"""Time that is not training is taken out of the speed once, also where one pause lies within another."""

import time

import pytest

from lit_gpt_dist.callbacks.recorder import StepRecorder


def test_a_pause_within_a_pause_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 10.0])  # validation begins, compiling begins, ends, validation ends
    recorder = StepRecorder()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    recorder.times.begin = lambda: None  # type: ignore[method-assign]
    validation = recorder.pause_began()
    compiling = recorder.pause_began()
    recorder.pause_ended("compile", compiling)
    recorder.pause_ended("validation", validation)
    assert recorder.paused_seconds == {"compile": 2.0, "validation": 8.0}
