"""Checkpoints with real ranks on gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(420)  # over 100 ranks are started in all; a busy machine takes its time

SCRIPT = Path(__file__).parent / "checkpoint_ranks.py"
TOLERANCE = 1e-6  # in fp32 the ranks' sums come in another order; the loss is about 3.5 nats


def run(folder, *scenarios, timeout=400):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *scenarios],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the short scenarios found: one process for all of them, for importing takes longer than any."""
    return run(tmp_path_factory.mktemp("short"), "background", "disk_full", "shared_out", "replicas", "agreement")


def test_a_checkpoint_of_any_layout_continues_the_curve_on_another(tmp_path):
    """37 tokens and norms of 32 on 1, 2, 3 and 4 ranks: shards that do not divide, and vocabularies that do not.

    Seven layouts, each two of them in one direction. All 49: python tests/numerics/checkpoint_ranks.py FOLDER matrix
    """
    worst = run(tmp_path, "one_way")["one_way"]
    assert len(worst) == 21
    assert max(worst.values()) <= TOLERANCE, worst


def test_killed_at_random_moments_a_run_continues_bit_for_bit(tmp_path):
    for strategy, outcome in run(tmp_path, "kills")["kills"].items():
        assert outcome["kills"] == 3, strategy
        assert outcome["damaged_checkpoints_seen"] == 0
        assert outcome["worst_difference"] == 0.0  # the same layout adds in the same order
        assert outcome["final_weights_equal"]


def test_a_save_in_the_background_is_whole_when_the_run_ends_at_once(found):
    outcome = found["background"]
    assert outcome == {"losses_equal": True, "weights_equal": True, "steps": [20, 23]}


def test_a_disk_that_is_full_on_one_rank_fails_the_save_on_all_and_leaves_the_previous_one(found):
    outcome = found["disk_full"]
    assert outcome["codes"] == [[0, 0], [0, 0]]
    assert outcome["told"] == 4  # both ranks, at once and in the background
    assert len(outcome["messages"]) == 1
    assert "step-00000020 was not saved: rank 1: " in outcome["messages"][0]
    assert "File too large" in outcome["messages"][0]
    assert outcome["newest"] == "step-00000010"
    assert outcome["left"] == ["step-00000010"]


def test_replicas_write_each_tensor_once_and_share_the_bytes(found):
    outcome = found["shared_out"]
    assert outcome["codes"] == [0, 0, 0]
    assert outcome["times_written"] == [f"model.w{i}" for i in range(8)]
    assert max(outcome["bytes"]) <= 1.6 * min(outcome["bytes"])  # 8 equal tensors on 3 ranks: 3, 3, 2


def test_replicas_of_shards_share_what_they_write(found):
    outcome = found["replicas"]
    assert outcome["codes"] == [0, 0, 0, 0]
    first, second, third, fourth = outcome["mine"]
    assert (first, third) == (second, fourth), "the two parts of a tensor are written by one replica"
    assert sorted([*first, *third]) == [f"model.w{i}" for i in range(8)]
    assert len(first) == len(third) == 4


def test_all_ranks_hear_the_same_one_step_later(found):
    outcome = found["agreement"]
    assert outcome["codes"] == [0, 0, 0]
    assert outcome["slow"] == [[0, 0, 0, 0, 2, 2, 2]] * 3
    first, *others = outcome["fast"]
    assert others == [first, first], "all ranks hear the same at the same step"
    assert 2 in first[4:36]
    assert 2 not in first[:4]
