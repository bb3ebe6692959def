"""Shares, collectives and verdicts from synthetic traces whose truth is known."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from lit_gpt_dist.cli import main
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.trace import flight, intervals, kineto
from lit_gpt_dist.trace.overlap import analyse, reports
from lit_gpt_dist.trace.verdict import verdict

MS = 1000.0


def span(name: str, begin_ms: float, end_ms: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin_ms * MS, "dur": (end_ms - begin_ms) * MS, "args": args}


def nccl(kind: str, begin_ms: float, end_ms: float, elements: int = 1 << 20, dtype: str = "Float") -> dict[str, Any]:
    sizes = {"In msg nelems": elements, "Out msg nelems": elements, "dtype": dtype, "stream": 20}
    return span(f"ncclDevKernel_{kind}_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", begin_ms, end_ms, **sizes)


def step(number: int, begin_ms: float, end_ms: float) -> dict[str, Any]:
    return span(f"ProfilerStep#{number}", begin_ms, end_ms, "user_annotation")


OVERLAPPED = [
    step(1, 0, 100),
    span("gemm", 0, 90, stream=7),
    nccl("AllReduce", 50, 70),
    nccl("AllReduce", 80, 100),
]


def test_unions_intersections_and_differences_of_time() -> None:
    first = intervals.union([(0, 2), (1, 3), (5, 6)])
    assert first == [(0, 3), (5, 6)]
    assert intervals.intersect(first, [(2, 5.5)]) == [(2, 3), (5, 5.5)]
    assert intervals.subtract(first, [(1, 2), (5, 9)]) == [(0, 1), (2, 3)]
    assert intervals.total(first) == 4


def test_hidden_and_exposed_communication_add_up_to_all_of_it() -> None:
    report = analyse(kineto.parse(OVERLAPPED, 0))
    assert report.window == 100 * MS
    assert report.communication == 40 * MS
    assert report.hidden == 30 * MS
    assert report.exposed == 10 * MS
    assert report.share(report.exposed) == pytest.approx(0.1)


def test_collectives_are_counted_by_kind_with_their_sizes() -> None:
    events = [*OVERLAPPED, nccl("AllGather", 40, 45, 1 << 10, "BFloat16"), nccl("AllReduce", 99, 100, 1)]
    report = analyse(kineto.parse(events, 0))
    assert report.kinds["all-reduce"].per_step == 3
    assert report.kinds["all-reduce"].largest == 4 << 20
    assert report.kinds["all-gather"].total_bytes_per_step == 2 << 10
    assert report.buckets == 2  # the single number is a norm, not a bucket


def test_a_generic_kernel_is_told_by_its_arguments() -> None:
    arguments = {
        "Collective name": "_reduce_scatter_base",
        "In msg nelems": 8,
        "Out msg nelems": 4,
        "dtype": "BFloat16",
    }
    events = [step(1, 0, 100), span("gemm", 0, 90), span("ncclDevKernel_Generic", 90, 100, **arguments)]
    report = analyse(kineto.parse(events, 0))
    assert report.kinds["reduce-scatter"].largest == 16
    assert report.buckets == 1


def test_an_all_to_all_in_a_replay_is_told_by_its_kernel() -> None:
    """It reduces gradients under fsdp2; a replay has no arguments of it."""
    events = [
        step(1, 0, 100),
        span("gemm", 0, 90),
        span("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 90, 100),
    ]
    report = analyse(kineto.parse(events, 0))
    assert list(report.kinds) == ["all-to-all"]
    assert report.buckets == 1


def test_a_trace_without_overlap_is_recognised() -> None:
    events = [step(1, 0, 100), span("gemm", 0, 60), nccl("AllReduce", 60, 100)]
    lines = verdict([analyse(kineto.parse(events, 0))])
    assert "40% of the step is exposed" in lines[0]
    assert any(line.startswith("no overlap: the gradients go out in one piece") for line in lines)


def test_a_trace_with_good_overlap_gets_no_remedy() -> None:
    lines = verdict([analyse(kineto.parse(OVERLAPPED, 0))])
    assert len(lines) == 1
    assert "good" in lines[0]


@pytest.mark.parametrize(("exposed", "band"), [(10, "good"), (30, "acceptable"), (50, "the bottleneck")])
def test_bands_are_those_of_the_fact_sheet(exposed: int, band: str) -> None:
    events = [step(1, 0, 100), span("gemm", 0, 100 - exposed), nccl("AllReduce", 100 - exposed - 5, 100)]
    assert f"({band}:" in verdict([analyse(kineto.parse(events, 0))])[0]


def test_waiting_for_a_late_rank_is_told_from_transfer() -> None:
    early = [step(1, 0, 100), span("gemm", 0, 50), nccl("AllReduce", 50, 100)]
    late = [step(1, 0, 100), span("gemm", 0, 95), nccl("AllReduce", 95, 100)]
    found = reports([kineto.parse(early, 0), kineto.parse(late, 1)])
    assert [report.waited for report in found] == [45 * MS, 0]
    assert any(line.startswith("waiting: 90%") for line in verdict(found))


def test_a_gap_while_data_are_fetched_is_named() -> None:
    events = [step(1, 0, 100), span(kineto.DATA, 0, 30, "user_annotation"), span("gemm", 0, 1), span("gemm", 30, 100)]
    assert any("rank 0 has nothing to do for 29%" in line for line in verdict([analyse(kineto.parse(events, 0))]))


def test_on_a_cpu_gloo_ranges_count_when_started_within_a_step() -> None:
    events = [
        step(1, 0, 100),
        span(kineto.STEP, 10, 100, "user_annotation"),
        span("c10d::allreduce_", 2, 3, "cpu_op"),  # the run's own agreement
        span("gloo:all_reduce", 3, 4, "user_annotation"),
        span("aten::mm", 10, 60, "cpu_op"),
        span("c10d::_reduce_scatter_base_", 50, 51, "cpu_op"),
        span("gloo:all_reduce", 50, 80, "user_annotation"),
    ]
    report = analyse(kineto.parse(events, 0))
    assert list(report.kinds) == ["reduce-scatter"]
    assert report.hidden == 10 * MS
    assert report.exposed == 20 * MS
    assert report.kinds["reduce-scatter"].largest is None  # gloo does not tell


def test_the_command_prints_shares_and_draws_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for rank in range(2):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps({"traceEvents": OVERLAPPED}))
    assert main(["trace", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "10.0%" in shown
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_traces_gets_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "--profile" in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "rank-0.json").write_text("[]")
    assert main(["trace", str(tmp_path)]) == 2
    assert "rank-0.json is not a trace" in capsys.readouterr().err


# ---- flight recorder ----------------------------------------------------------------------------------------------


def entry(number: int, done: bool = True, group: str = "0") -> dict[str, Any]:
    return {
        "process_group": [group, "default_pg"],
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "state": "completed" if done else "scheduled",
        "input_sizes": [[4, 4]],
        "is_p2p": False,
        "record_id": number,
    }


def test_the_rank_that_did_not_join_a_collective_is_named() -> None:
    dumps = {0: {"entries": [entry(1), entry(2, done=False)]}, 1: {"entries": [entry(1)]}}
    assert flight.describe(dumps)[-1].startswith("rank 1 is missing: it has started 1 collectives")


def test_a_rank_without_a_dump_did_not_answer() -> None:
    dumps = {0: {"entries": [entry(1, done=False)], "pg_config": {"0": {"ranks": "[0, 1]"}}}}
    assert flight.describe(dumps)[-1].startswith("rank 1 did not answer")


def test_pickled_dumps_are_read_and_code_in_them_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "nccl-rank-0").write_bytes(pickle.dumps({"entries": [entry(1)]}))
    assert list(flight.read_dumps(tmp_path)) == [0]
    (tmp_path / "nccl-rank-1").write_bytes(pickle.dumps(Path("x")))
    with pytest.raises(UserError, match="it names"):
        flight.read_dumps(tmp_path)
