"""Reading result lines: what is read, what is named and skipped."""

import json
import math

import pytest

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.report.results import parse_line, read_results, suspicious

LINE = dict(
    **dict(tag="a", mode="ddp", size="tiny", world=2, accum=2, micro=16, global_batch=64, context=64, step_ms=100.0),
    **dict(tok_s=40_960.0, tokens_per_step=4096, losses=[4.0, 3.9], precision="32-true", device="cpu", compile=False),
)


def line(**changes):
    return json.dumps({**LINE, **changes})


def test_a_line_is_read_with_its_fields():
    run = parse_line(line(mem_gib=None, compile=True), "f:1")
    assert (run.mode, run.world, run.losses, run.start, run.last_step) == ("ddp", 2, (4.0, 3.9), 0, 2)
    assert run.mem_gib is None
    assert run.compile == "yes"


def test_unknown_fields_are_no_damage():
    assert parse_line(line(invented_later=1), "f:1").tag == "a"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"tag": "a", "losses": [4.0, 3', "not JSON"),
        ("[1]", "a list, not an object"),
        (line(world=0), "world is 0"),
        (line(world="two"), "world is 'two'"),
        (line(tok_s=-1), "tok_s is -1"),
        (line(losses=[1, "x"]), "losses is not a list of numbers"),
        (line(mem_gib="much"), "mem_gib is 'much'"),
        (line(context=64.0), "context is 64.0, not a whole number"),
        (line(recompute_blocks=0), "recompute_blocks is 0, not a whole number of at least 1"),
        (line(global_batch=[64]), "global_batch is [64]"),
        (line(mem_gib=math.inf), "mem_gib is inf"),
        (line(corpus_hash=5), "corpus_hash is 5, not text"),
        (line(versions=["2.11"]), "versions is ['2.11'], not an object"),
        (line(start=-1), "start is -1"),
        (line(status="fine"), "status 'fine'"),
        ('{"tag": "a"}', "no mode, size, world, micro, accum, losses"),
    ],
)
def test_a_damaged_line_is_named_with_its_reason_and_the_others_are_read(tmp_path, text, why):
    path = tmp_path / "results.jsonl"
    path.write_text(f"{line()}\n{text}\n\n{line(tag='b')}\n")
    runs, damaged = read_results([path])
    assert [run.tag for run in runs] == ["a", "b"]
    assert [d.source for d in damaged] == [f"{path}:2"]
    assert why in damaged[0].why


def test_bytes_that_are_no_text_damage_one_line_only(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(line().encode() + b"\n\xff\xfe\x00\n" + line(tag="b").encode())
    runs, damaged = read_results([path])
    assert len(runs) == 2
    assert len(damaged) == 1


def test_an_out_of_memory_line_needs_no_measurement():
    run = parse_line(json.dumps(dict(tag="a", mode="ddp", size="big", world=1, accum=1, micro=8, status="oom")), "f:1")
    assert (run.status, run.tok_s, run.global_batch) == ("oom", None, 8)


def test_a_loss_that_is_no_number_stays_in_its_place():
    assert math.isnan(parse_line(line(losses=[4.0, None, 3.0]), "f:1").losses[1])


def test_a_missing_file_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_results([tmp_path / "none.jsonl"])


@pytest.mark.parametrize("factor", [2, 0.5, 4])
def test_a_rate_off_by_accumulation_or_ranks_is_noticed(factor):
    assert suspicious(parse_line(line(), "f:1")) is None
    assert "tok_s" in (suspicious(parse_line(line(tok_s=40_960.0 * factor), "f:1")) or "")


def test_tokens_per_step_that_are_not_the_global_batch_are_noticed():
    assert "tokens_per_step" in (suspicious(parse_line(line(tokens_per_step=2048), "f:1")) or "")
