"""The planner's column: predicted where the planner can, left out where it cannot."""

import json

import pytest

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import preset
from lit_gpt_dist.report.plan import predictions
from lit_gpt_dist.report.results import parse_line
from lit_gpt_dist.report.statistics import group_cases
from lit_gpt_dist.report.tables import speed_table


@pytest.fixture(autouse=True)
def no_calibration_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_GPT_DIST_CACHE", str(tmp_path))


def case(device="NVIDIA H200", **fields):
    model = preset("gpt2-124m")
    record = dict(tag="a", mode="ddp", size="gpt2-124m", world=2, accum=1, micro=16, global_batch=32, context=1024)
    record |= dict(vocab=model.vocab_size, params=model.parameters(), precision="bf16-mixed", device=device)
    record |= dict(step_ms=40.0, tok_s=819_200.0, tokens_per_step=32_768, mem_gib=12.0, losses=[4.0]) | fields
    return group_cases([parse_line(json.dumps(record), "f:1")])


def test_a_known_card_and_link_are_predicted_and_shown_beside_the_measured():
    cases = case()
    ((rate, gib),) = predictions(cases, link="nvlink").values()
    assert rate is not None
    assert gib is not None
    table = speed_table(cases, {0: (rate, gib)})
    row = dict(zip(table.headers, table.rows[0], strict=True))
    assert row["plan tok/s"].endswith(f"({819_200 / rate:.2f})")
    assert row["plan GiB"].endswith(f"({12.0 / gib:.2f})")


def test_without_a_link_only_memory_is_predicted():
    ((rate, gib),) = predictions(case()).values()
    assert rate is None
    assert gib is not None


def test_what_the_planner_does_not_know_is_left_out():
    assert predictions(case(mode="invented")) == {}
    assert predictions(case(device="unheard of", mem_gib=None)) == {}


def test_a_wrong_link_is_a_users_error():
    with pytest.raises(UserError, match="link 'string' is not"):
        predictions(case(), link="string")
