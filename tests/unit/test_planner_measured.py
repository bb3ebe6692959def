"""The plan against what was measured: the lines behind docs/results.md, as `plan --compare` reads them."""

import json
from pathlib import Path

import pytest

from lit_gpt_dist.planner import calibration
from lit_gpt_dist.planner.compare import compare_line, miss
from lit_gpt_dist.planner.hardware import UNKNOWN_LINK

RESULTS = Path(__file__).parents[2] / "docs" / "results"
LINES = [json.loads(line) for line in (RESULTS / "two_h200.jsonl").read_text().splitlines()]
CALIBRATION = calibration.load(RESULTS / "calibration-h200.json")
MEMORY, RECOMPUTED, STEP = 0.015, 0.11, 0.15  # docs/plan.md
SMALL_GIB = 0.025  # there too: some 25 MiB that baby has besides


@pytest.mark.parametrize("case", sorted({line["case"] for line in LINES}))
def test_a_measured_case_is_planned_as_closely_as_the_page_says(case):
    for line in (line for line in LINES if line["case"] == case):
        found = compare_line(line, CALIBRATION, CALIBRATION.link(line["world"]) or UNKNOWN_LINK)
        memory, step = miss(found.memory_gib), miss(found.step_ms)
        assert memory is not None
        assert step is not None
        small = SMALL_GIB / line["mem_gib"]
        assert abs(memory) <= (RECOMPUTED if line["recompute"] == "full" else max(MEMORY, small))
        assert abs(step) <= STEP
