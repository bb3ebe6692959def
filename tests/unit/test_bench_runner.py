"""Running cases with a stand-in for `fit`: results, out of memory, failures, resuming, and what is left behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from lit_gpt_dist.bench.case import Case, Setting
from lit_gpt_dist.bench.ledger import Ledger
from lit_gpt_dist.bench.process import run
from lit_gpt_dist.bench.runner import Runner
from lit_gpt_dist.bench.search import best_of, fastest, largest
from lit_gpt_dist.bench.session import Session
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.report.results import read_results

FIT = """
import json, os, pathlib, sys
words = sys.argv[1:]
options = dict(zip(words[::2], words[1::2]))
folder = pathlib.Path(options["--trainer.default_root_dir"])
micro = int(options["--data.micro_batch"])
with open(os.environ["CALLS"], "a") as file:
    file.write(folder.parent.name + "/" + folder.name + "\\n")
if micro > int(os.environ.get("FITS", 64)):
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
if micro in (2, 6, 10):  # refused by `fit`; two of them for one reason
    print(f"error: {'optim.lrr' if micro != 10 else micro} is no good", file=sys.stderr)
    sys.exit(2)
if micro == 13:
    sys.exit("first line\\nRuntimeError: thirteen")
line = dict(tag="fit's own", mode=options["--trainer.strategy"], size=options["--model.size"], world=int(options["--trainer.devices"]),
            micro=micro, accum=1, global_batch=int(options["--data.global_batch"]), tok_s=1000.0 * min(micro, 16), losses=[1.0, 0.5],
            precision="32-true", params=1, command="fit's own")
(folder / "results.jsonl").write_text(json.dumps(line) + "\\n")
"""


@pytest.fixture
def runner(tmp_path):
    return make_runner(tmp_path)


def make_runner(tmp_path, timeout_seconds=60.0, code=FIT, **environment):
    script = tmp_path / "fit.py"
    script.write_text(code)
    everything = {**os.environ, "CALLS": str(tmp_path / "calls"), **environment}
    return Runner(tmp_path / "bench", [sys.executable, str(script)], Setting(), everything, timeout_seconds)


def calls(tmp_path):
    path = tmp_path / "calls"
    return path.read_text().split() if path.exists() else []


def case(micro=16, devices=2):
    return Case("tiny", "ddp", devices, micro, 1)


def test_a_result_is_collected_with_its_case_and_round(runner):
    line = runner.measure(case(), 1)
    (run,), damaged = read_results([runner.ledger.path])
    assert not damaged
    assert (run.tag, run.case, run.round, run.status, run.tok_s) == (case().name, case().name, 1, "ok", 16_000.0)
    assert run.command is not None
    assert run.command == line["command"]
    assert "--data.micro_batch 16" in run.command


def test_out_of_memory_is_a_result(runner):
    assert runner.measure(case(128), 0)["status"] == "oom"
    (run,), _ = read_results([runner.ledger.path])
    assert run.status == "oom"
    assert "CUDA out of memory" in (run.error or "")


def test_ranks_that_wait_for_one_without_memory_are_ended_early(tmp_path, monkeypatch):
    from lit_gpt_dist.bench import process

    monkeypatch.setattr(process, "AFTER_OUT_OF_MEMORY_SECONDS", 0.2)
    code = "import time; print('torch.OutOfMemoryError: CUDA out of memory', flush=True); time.sleep(100)"
    line = make_runner(tmp_path, code=code, timeout_seconds=60).measure(case(), 0)
    assert line["status"] == "oom"
    assert line["seconds"] < 60


def test_a_killed_process_counts_as_out_of_memory(tmp_path):
    runner = make_runner(tmp_path, code="import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert runner.measure(case(), 0)["status"] == "oom"


def test_a_failure_keeps_its_last_words(runner):
    line = runner.measure(case(13), 0)
    assert line["status"] == "failed"
    assert "exit code 1" in line["error"]
    assert line["error"].endswith("RuntimeError: thirteen")


def test_a_run_that_succeeds_without_a_result_is_a_failure(tmp_path):
    assert "it wrote no result" in make_runner(tmp_path, code="print('hello')").measure(case(), 0)["error"]


def test_a_run_that_does_not_end_is_a_failure_that_says_so(tmp_path):
    line = make_runner(tmp_path, timeout_seconds=1.0, code="import time; time.sleep(100)").measure(case(), 0)
    assert line["status"] == "failed"
    assert "no end after 1 s" in line["error"]


def ended(pid, patience_seconds=10.0):
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if status == "Z":  # ended; whoever adopted it has not asked yet
            return True
        time.sleep(0.05)
    return False


def test_finished_rounds_are_not_run_again_and_failures_are(tmp_path):
    cases = [case(), case(128), case(13)]
    for _ in range(2):
        session = Session(make_runner(tmp_path), Console(quiet=True))
        session.run_all(cases, 2)
    ran = calls(tmp_path)
    assert ran.count(f"{case().name}/round-0") == 1
    assert ran.count(f"{case().name}/round-1") == 1
    assert len([name for name in ran if name.startswith(case(128).name)]) == 1  # out of memory counts for all rounds
    assert ran.count(f"{case(13).name}/round-0") == 2
    assert session.reused == 4


def test_a_users_mistake_is_not_run_again(tmp_path):
    session = Session(make_runner(tmp_path), Console(quiet=True))
    session.run_all([case(), case(10)], 3)
    assert len([name for name in calls(tmp_path) if name.startswith(case(10).name)]) == 1
    assert [line["status"] for line in session.results].count("ok") == 3


def test_a_mistake_that_all_cases_share_stops_the_bench_with_its_words(tmp_path):
    session = Session(make_runner(tmp_path), Console(quiet=True))
    with pytest.raises(UserError, match=r"^optim\.lrr is no good$"):
        session.run_all([case(10), case(2), case(6), case()], 2)
    assert len(calls(tmp_path)) == 3


def test_a_mistake_in_options_passed_on_stops_the_bench_at_its_first_case(tmp_path):
    runner = make_runner(tmp_path)
    runner.setting = Setting(fit_options=("--optim.lrr", "1e-3"))
    with pytest.raises(UserError, match=r"optim\.lrr"):
        Session(runner, Console(quiet=True)).run_all([case(2), case()], 1)
    assert len(calls(tmp_path)) == 1


def test_a_time_limit_leaves_rounds_for_the_next_call(tmp_path):
    session = Session(make_runner(tmp_path), Console(quiet=True), time_limit_seconds=0)
    session.run_all([case(), case(8)], 2)
    assert (session.left_out, calls(tmp_path)) == (4, [])
    session = Session(make_runner(tmp_path), Console(quiet=True), time_limit_seconds=600)
    session.run_all([case(), case(8)], 2)
    assert (session.left_out, len(calls(tmp_path))) == (0, 4)


def test_another_setting_is_another_case(tmp_path):
    runner = make_runner(tmp_path)
    runner.measure(case(), 0)
    runner.setting = Setting(steps=99)
    assert runner.known(case(), 0) is None


def test_a_line_cut_off_by_a_power_cut_is_dropped_and_its_round_runs_again(runner, tmp_path):
    runner.measure(case(), 0)
    runner.measure(case(), 1)
    text = runner.ledger.path.read_text()
    runner.ledger.path.write_text(text[:-40])
    again = make_runner(tmp_path)
    assert again.ledger.cut_off
    assert again.known(case(), 0) is not None
    assert again.known(case(), 1) is None
    assert json.loads(runner.ledger.path.read_text())["round"] == 0


def test_a_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"case_hash": "a", "round": 0, "status": "ok"}')
    ledger = Ledger(path)
    ledger.append({"case_hash": "b", "round": 0, "status": "ok"})
    assert not ledger.cut_off
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_a_bench_that_is_killed_outright_leaves_no_process(tmp_path):
    code = f"""
import sys, pathlib
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from lit_gpt_dist.bench.process import run
run([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(100)"], pathlib.Path({str(tmp_path / "out")!r}), {{}}, 100)
"""
    bench = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 20
    while not ((tmp_path / "out").exists() and (tmp_path / "out").read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    bench.kill()
    bench.wait()
    assert ended(int((tmp_path / "out").read_text()))


IGNORES_TERM = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(100)"
STARTS_ANOTHER = (
    f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {IGNORES_TERM!r}]); time.sleep(100)"
)


@pytest.mark.parametrize("code", [IGNORES_TERM, STARTS_ANOTHER])
def test_ctrl_c_ends_the_run_and_what_it_started_and_is_passed_on(tmp_path, monkeypatch, code):
    from lit_gpt_dist.bench import process

    monkeypatch.setattr(
        process.end_session, "__defaults__", (0.5,)
    )  # patience with those that ignore the polite signal

    def interrupt_once_started():
        if (tmp_path / "out").read_text().strip():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([sys.executable, "-c", code], tmp_path / "out", dict(os.environ), 60, interrupt_once_started)
    assert ended(int((tmp_path / "out").read_text()))


# ---- searches ----------------------------------------------------------------------------------------------------------


def test_fastest_stops_at_the_end_of_memory_and_keeps_the_best(tmp_path):
    runner = make_runner(tmp_path, FITS="16")
    found = fastest(case(4), lambda c: runner.measure(c, 0))
    assert found.case is not None
    assert found.case.micro == 16
    assert found.limit == "micro-batch 32: out of memory"


def test_fastest_stops_when_nothing_is_gained(runner):
    found = fastest(case(4), lambda c: runner.measure(c, 0))
    assert found.case is not None
    assert (found.case.micro, found.limit) == (16, "micro-batch 64: no faster")


def test_fastest_under_a_global_batch_keeps_it():
    tried = []

    def measure(c):
        tried.append((c.micro, c.accumulate, c.global_batch))
        return {"status": "ok", "tok_s": 1000.0 * c.micro}

    found = fastest(Case("tiny", "ddp", 2, 4, 8), measure, global_batch=64)
    assert tried == [(4, 8, 64), (8, 4, 64), (16, 2, 64), (32, 1, 64)]
    assert found.case is not None
    assert found.case.micro == 32


def test_best_of_takes_the_most_tokens():
    def measure(c):
        return {"status": "ok", "tok_s": 10.0 * c.devices}

    best = best_of([fastest(case(4, devices), measure) for devices in (1, 4, 2)])
    assert best is not None
    assert best.case is not None
    assert best.case.devices == 4


@pytest.mark.parametrize("limit", [1, 2, 5, 23, 24, 40, 100])
def test_largest_finds_the_limit_within_an_eighth(limit):
    def measure(c):
        return {"status": "ok" if dict(c.shape)["layers"] <= limit else "oom"}

    found = largest(Case("big", "fsdp2", 2, 1, 1), 2, measure)
    depth = dict(found.case.shape)["layers"] if found.case else 0
    assert depth <= limit
    assert limit - depth <= max(1, limit / 8)


def test_largest_stops_at_a_failure_that_is_not_memory():
    found = largest(Case("big", "ddp", 2, 1, 1), 2, lambda c: {"status": "failed", "error": "x\nRuntimeError: y"})
    assert found.case is None
    assert found.limit == "2 layers: RuntimeError: y"
