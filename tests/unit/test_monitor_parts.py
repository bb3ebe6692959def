"""Statistics and judgements of the monitor, without a Trainer."""

import json
import math
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_gpt_dist.callbacks.clock import HostClock
from lit_gpt_dist.callbacks.exchange import Exchange
from lit_gpt_dist.callbacks.guard import BadStepGuard, read_flags
from lit_gpt_dist.callbacks.learning import LearningPart
from lit_gpt_dist.callbacks.oom import out_of_memory, remedies
from lit_gpt_dist.callbacks.options import MonitorOptions, parse_profile
from lit_gpt_dist.callbacks.phases import Sample, phase_seconds
from lit_gpt_dist.callbacks.position import Position, who_is_missing
from lit_gpt_dist.callbacks.step_times import StepTimes, percentiles
from lit_gpt_dist.callbacks.stragglers import StragglerWatch, Work, cause, slowest
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.parallel import DDP, FSDP2

ONE_DEVICE = SimpleNamespace(world_size=1, global_rank=0)


class FakeClock:
    """Marks are given beforehand."""

    def __init__(self, *marks: float) -> None:
        self.marks = list(marks)

    def mark(self) -> float:
        return self.marks.pop(0)

    def seconds(self, first: float, second: float) -> float:
        return second - first


# ---- time ---------------------------------------------------------------------------------------------------------


def test_percentiles_of_a_hundred_values() -> None:
    assert percentiles(list(range(101))) == {50: 50.0, 95: 95.0, 99: 99.0}
    assert percentiles([]) == {}


def test_a_pause_between_two_steps_is_in_neither() -> None:
    times = StepTimes(FakeClock(0, 1, 10, 12), window=5)
    times.begin()
    times.step_ended()
    times.begin()  # at 10: a validation took 9
    times.step_ended()
    times.collect(times.take())
    assert list(times.seconds) == [1, 2]


def test_only_the_last_window_counts() -> None:
    times = StepTimes(FakeClock(*range(10)), window=3)
    times.begin()
    for _ in range(6):
        times.step_ended()
    times.collect(times.take())
    assert len(times.seconds) == 3


def test_phases_of_a_step_add_up_to_it_and_waiting_is_taken_out_of_backward() -> None:
    marks = [
        ("data", 1.0),
        ("forward", 3.0),
        ("backward", 7.0),
        ("forward", 9.0),
        ("backward", 15.0),
        ("optimizer", 16.0),
    ]
    sample = Sample(0.0, marks, [(True, 13.0, 15.0), (False, 2.0, 2.5)])
    found = phase_seconds(sample, HostClock())
    assert found == {"data": 1.0, "forward": 3.5, "backward": 8.0, "communication": 2.5, "optimizer": 1.0}
    assert sum(found.values()) == 16.0


def test_a_process_knows_how_old_it_is() -> None:
    program = "import time; from lit_gpt_dist.callbacks.clock import process_seconds as age; a = age(); time.sleep(0.2); print(a, age())"
    began = time.monotonic()
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout
    first, second = map(float, out.split())
    assert 0 < first <= second - 0.2 <= time.monotonic() - began
    assert first > 0.05, "importing counts too"


# ---- numbers of all ranks -----------------------------------------------------------------------------------------


def test_one_rank_exchanges_with_itself() -> None:
    losses = torch.tensor([1.0, 2.0], dtype=torch.float64)
    means, table = Exchange(ONE_DEVICE, losses, [3.0, torch.tensor(4.0)]).read()
    assert means == [1.0, 2.0]
    assert table == [[3.0, 4.0]]


def test_the_update_ratio_is_that_of_the_weights_before_and_after() -> None:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    for _ in range(3):
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    moved = sum(float((now.detach() - was).square().sum()) for now, was in zip(weights, before, strict=True))
    after = sum(float(now.detach().square().sum()) for now in weights)
    part, trainer = LearningPart(), SimpleNamespace(optimizers=[optimizer], world_size=1, global_step=3)
    trainer.lr_scheduler_configs = []
    row = [float(value) for value in part.measure(trainer, SimpleNamespace(step_graph=None))]
    found = part.report(trainer, None, [row])["train/update_ratio"]
    assert math.isclose(found, math.sqrt(moved / after), rel_tol=1e-6)  # AdamW counts steps in fp32


# ---- stragglers ---------------------------------------------------------------------------------------------------


def trainer_that_notes(told: list[str]) -> Any:
    bar = SimpleNamespace()
    return SimpleNamespace(is_global_zero=True, callbacks=[], world_size=3, bar=bar, told=told)


def test_a_rank_is_named_after_three_slow_readings_in_a_row_with_its_cause(capsys: pytest.CaptureFixture) -> None:
    watch, trainer = StragglerWatch(), trainer_that_notes([])
    watch.names = ["a cuda:0", "a cuda:1", "b cuda:0"]
    normal, slow = Work(0.001, 0.1, 0.05), Work(0.051, 0.1, 0.0)
    for _ in range(2):
        watch.judge(trainer, [normal, normal, slow])
    watch.judge(trainer, [normal, normal, normal])  # once not slow: the count starts again
    for _ in range(2):
        watch.judge(trainer, [normal, normal, slow])
    assert watch.named == []
    watch.judge(trainer, [normal, normal, slow])
    watch.judge(trainer, [normal, normal, slow])
    assert watch.named == [(2, "data")]
    assert capsys.readouterr().out.count("rank 2 (b cuda:0) is slow at data") == 1


def test_the_cause_is_where_the_rank_exceeds_the_others_most() -> None:
    work = [Work(0.001, 0.1, 0.0), Work(0.002, 0.2, 0.0), Work(0.001, 0.1, 0.0)]
    assert slowest(work) == (1, pytest.approx(2.0, abs=0.01))
    assert cause(work, 1) == "compute"


# ---- bad steps ----------------------------------------------------------------------------------------------------


def watched_steps(guard: BadStepGuard, norms: list[float], fused: bool) -> list[float]:
    """The weight after each step; every gradient is 1 and the norm is told."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.5, fused=fused)
    after = []
    for norm in norms:
        weight.grad = torch.full_like(weight, norm)
        guard._watch(optimizer, torch.tensor(norm))
        optimizer.step()
        after.append(float(weight.detach()))
    return after


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_skip_leaves_the_weights_alone_for_one_step(bad: float, fused: bool) -> None:
    first, second, third = watched_steps(BadStepGuard("skip"), [1.0, bad, 1.0], fused)
    assert first == second
    assert third != second
    assert math.isfinite(third)


@pytest.mark.parametrize("fused", [True, False])
def test_stop_leaves_the_weights_alone_from_the_bad_step_on(fused: bool) -> None:
    first, *later = watched_steps(BadStepGuard("stop"), [1.0, math.nan, 1.0, 1.0], fused)
    assert later == [first] * 3


def test_a_spike_is_skipped_and_does_not_move_the_mean() -> None:
    guard = BadStepGuard("skip", spike_factor=5)
    after = watched_steps(guard, [1.0] * 30 + [100.0, 1.0], fused=True)
    assert after[30] == after[29]
    assert after[31] != after[30]
    assert float(guard._mean) == pytest.approx(1.0)  # type: ignore[arg-type]


def test_what_is_a_spike_is_the_same_after_a_resume() -> None:
    norms = [1.0] * 30 + [100.0, 1.0]
    straight, before = BadStepGuard("skip", spike_factor=5), BadStepGuard("skip", spike_factor=5)
    after = watched_steps(straight, norms, fused=True)
    watched_steps(before, norms[:30], fused=True)
    resumed = BadStepGuard("skip", spike_factor=5)
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    first, second = watched_steps(resumed, norms[30:], fused=True)
    assert (first == second) is False, "the spike was left out, and the step after it taken"
    assert after[30] == after[29]
    assert float(resumed._mean) == float(straight._mean)  # type: ignore[arg-type]
    assert resumed._count == straight._count == len(norms)


def test_the_first_bad_step_is_found_among_those_since_the_last_look() -> None:
    seen = [(step, torch.tensor(1.0), torch.tensor(norm), None) for step, norm in enumerate([1.0, math.nan, math.inf])]
    assert read_flags(seen) == [False, True, True]


# ---- hangs --------------------------------------------------------------------------------------------------------


def test_a_rank_that_stalled_outside_a_collective_is_missing() -> None:
    waiting = Position(0, 12, "backward", {"0": 54}, {"0": 54})
    stalled = Position(1, 12, "forward", {"0": 53})
    assert who_is_missing([waiting, stalled], 2).startswith("rank 1 is missing: it stands in forward of step 13")


def test_a_rank_that_left_a_collective_out_is_missing() -> None:
    waiting = Position(0, 12, "forward", {"0": 53, "3": 1}, {"3": 1})
    ahead = Position(1, 12, "backward", {"0": 54}, {"0": 54})
    assert "rank 1 is missing: it went on to backward of step 13" in who_is_missing([waiting, ahead], 2)


def test_a_silent_rank_is_missing() -> None:
    assert who_is_missing([Position(0, 3, "backward")], 3).startswith("rank 1, 2 did not answer")


def test_a_position_survives_the_store() -> None:
    position = Position(1, 2, "data", {"0": 3}, {"0": 3}, "all_reduce", ("a:1 in f",))
    assert Position.from_json(position.to_json()) == position


# ---- options and memory -------------------------------------------------------------------------------------------


def test_steps_to_profile() -> None:
    assert parse_profile("20-24", 1) == (20, 24)
    assert parse_profile("3", 11) == (11, 13)
    for wrong in ("", "0", "5-2", "a", "1-"):
        with pytest.raises(UserError, match="profile"):
            parse_profile(wrong, 1)


def test_monitor_options_are_checked() -> None:
    for wrong in ({"window": 0}, {"spike_factor": 1.0}, {"rollback_skip_steps": 0}, {"sample_tokens": -1}):
        with pytest.raises(UserError, match="monitor"):
            MonitorOptions(**wrong)  # type: ignore[arg-type]


def test_remedies_for_missing_memory_come_cheapest_first_and_leave_out_what_is_in_use() -> None:
    plan = SimpleNamespace(micro_batch=8, global_batch=32, ranks=2)
    trainer = SimpleNamespace(datamodule=SimpleNamespace(plan=plan), strategy=DDP(), precision="bf16-mixed")
    shape = SimpleNamespace(context=64, layers=24)
    module = SimpleNamespace(recompute="none", recompute_blocks=None, device=torch.device("cpu"), config=shape)
    found = remedies(trainer, module)
    asked = [
        "--data.micro_batch 4",
        "--model.recompute selective:",
        "--model.recompute full:",
        "--trainer.strategy fsdp2",
    ]
    assert [" ".join(text.split()[:2]) for text in found[:4]] == asked
    assert "accumulate 4" in found[0]
    trainer.precision = "16-mixed"
    assert not any("selective" in text for text in remedies(trainer, module)), "it would be refused"
    trainer.strategy, module.recompute = FSDP2(), "full"
    assert not any("--trainer.strategy" in text or "--model.recompute" in text for text in remedies(trainer, module))
    module.recompute_blocks = 16
    assert [text.partition(":")[0] for text in remedies(trainer, module) if "recompute" in text] == [
        "--model.recompute_blocks 24 instead of 16"
    ]
    module.recompute_blocks = 24
    assert not any("recompute" in text for text in remedies(trainer, module))
    trainer.strategy = FSDP2(units="model")
    assert remedies(trainer, module)[1].startswith("--trainer.strategy fsdp2 --trainer.strategy.units blocks")


def test_what_counts_as_out_of_memory() -> None:
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not out_of_memory(RuntimeError("shape mismatch"))
