"""What the doctor measures, on gloo with 1, 2 and 4 ranks: every collective runs, and the identities hold in values."""

import json
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

from lit_gpt_dist.doctor.bandwidth import COLLECTIVES, bus_bandwidth
from lit_gpt_dist.doctor.launch import run_sweeps
from lit_gpt_dist.doctor.rates import measure_rates, seconds_per_call
from lit_gpt_dist.planner import calibration as calibrations
from lit_gpt_dist.planner.calibration import Calibration

SIZES = [40_000]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_reduce_is_a_reduce_scatter_and_an_all_gather_in_values(ranks):
    [found] = run_sweeps({"gloo": SIZES}, ranks)
    identity = found.identity
    # fp32 sums of `ranks` numbers of either order: a few units in the last place (6e-8 each)
    assert identity.relative_difference is None or identity.relative_difference <= ranks * 1e-7
    assert [(one.collective, one.size_bytes) for one in found.timings] == [
        (name, size) for name in COLLECTIVES for size in SIZES
    ]
    for one in found.timings:
        assert one.ranks == ranks
        if one.seconds is None:
            assert "not supported by gloo" in one.error
        else:
            assert one.busbw == bus_bandwidth(one.collective, one.size_bytes, one.seconds, ranks)
    assert multiprocessing.active_children() == []


@pytest.mark.timeout(120)
def test_the_doctor_measures_under_torchrun_too(tmp_path):
    output = tmp_path / "measured.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "lit_gpt_dist",
        "doctor",
    ]
    command += [
        "--measure",
        "--backend",
        "gloo",
        "--sizes",
        "4000",
        "--output",
        str(output),
        "--plot",
        str(tmp_path / "b.png"),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LIT_GPT_DIST_CACHE": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads(output.read_text())
    assert {one["collective"] for one in data["collectives"]} == set(COLLECTIVES)
    assert done.stdout.count("stored for `plan`") == 1
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(120)
def test_rates_of_this_cpu_are_positive_and_survive_their_file(tmp_path):
    torch.set_num_threads(1)
    rates = measure_rates(torch.device("cpu"))
    assert all(rate > 0 for _, rate in rates.matmul)
    assert min(rates.attention_flops, rates.copy_bandwidth, rates.launch_seconds) > 0
    made = Calibration("a CPU", rates, None, {}, "gloo", "now", {}, "fp32")
    calibrations.save(made, tmp_path / "c.json")
    assert calibrations.load(tmp_path / "c.json") == made
    assert made.rates_for("32-true") == rates
    assert made.rates_for("bf16-mixed") is None


def test_a_call_is_timed_alone_and_not_with_its_warm_up():
    calls = []
    seconds = seconds_per_call(lambda: calls.append(1), torch.device("cpu"))
    assert seconds >= 0
    assert len(calls) > 3
