"""Expanding lists into cases: what is run, what is skipped and why, and what `fit` is told."""

import dataclasses
from pathlib import Path

import pytest

from lit_gpt_dist import parallel
from lit_gpt_dist.bench.case import Case, Setting, case_hash, fit_arguments
from lit_gpt_dist.bench.command import main
from lit_gpt_dist.bench.matrix import ABLATIONS, SHARDED, Machine, Matrix, add_ablations, expand, split_batch
from lit_gpt_dist.bench.options import merged_options
from lit_gpt_dist.bench.runner import Runner, interleaved, time_left
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.parallel.sharded import FSDP2

STRATEGIES = {
    "single": frozenset[str](),
    "ddp": frozenset({"overlap", "bucket_cap_mb", "no_sync"}),
    "fsdp2": frozenset({"reshard_after_forward", "no_sync", "units"}),
}
CPU = Machine(None, STRATEGIES)
ONE_CARD = Machine(1, STRATEGIES)


def names(expansion):
    return [(c.strategy, c.devices, c.micro, c.accumulate) for c in expansion.cases]


def test_strong_scaling_holds_the_global_batch():
    found = expand(Matrix(devices=(1, 2, 4), micro=(16,), scaling=("strong",), global_batch=64), CPU)
    assert {c.global_batch for c in found.cases} == {64}
    assert ("single", 1, 16, 4) in names(found)
    assert ("ddp", 4, 16, 1) in names(found)
    assert len(found.cases) == 7


def test_weak_scaling_holds_the_batch_per_card():
    found = expand(Matrix(strategies=("ddp",), devices=(1, 2, 8), micro=(8,), accumulate=(4,)), CPU)
    assert [c.global_batch for c in found.cases] == [32, 64, 256]


def test_both_scalings_do_not_repeat_a_case():
    found = expand(
        Matrix(strategies=("ddp",), devices=(1, 2), micro=(32,), scaling=("weak", "strong"), global_batch=64), CPU
    )
    assert sorted(names(found)) == [("ddp", 1, 32, 1), ("ddp", 1, 32, 2), ("ddp", 2, 32, 1)]


@pytest.mark.parametrize(
    ("batch", "micro", "devices", "split"),
    [(64, 16, 2, (16, 2)), (64, 16, 8, (8, 1)), (64, 16, 3, None), (96, 64, 2, (48, 1)), (80, 16, 2, None)],
)
def test_a_global_batch_is_split_or_refused(batch, micro, devices, split):
    assert split_batch(batch, micro, devices) == split


def test_more_cards_than_there_are_are_skipped_with_the_number():
    found = expand(Matrix(strategies=("ddp",), devices=(1, 2)), ONE_CARD)
    assert names(found) == [("ddp", 1, 16, 1)]
    assert [skip.why for skip in found.skipped] == ["this machine has 1 card"]


def test_single_on_two_cards_and_strategies_not_there_are_skipped():
    found = expand(Matrix(strategies=("single", "zero1"), devices=(2,)), CPU)
    assert not found.cases
    assert {skip.what for skip in found.skipped} == {"tiny single on 2", "tiny zero1 on 2"}


def test_fp16_on_a_cpu_is_skipped_and_the_other_precisions_run():
    matrix = Matrix(strategies=("ddp",), precision=("16-mixed", "32-true"))
    found = expand(matrix, CPU)
    assert [c.precision for c in found.cases] == ["32-true"]
    assert "16-mixed does not run on a CPU" in found.skipped[0].why
    assert len(expand(matrix, ONE_CARD).cases) == 2


def test_fp16_in_shards_which_fit_refuses_is_skipped_before_it_starts():
    assert set(SHARDED) == {name for name, cls in parallel.STRATEGIES.items() if issubclass(cls, FSDP2)}
    found = expand(Matrix(strategies=("ddp", "fsdp2"), precision=("16-mixed", "bf16-mixed")), ONE_CARD)
    assert [(c.strategy, c.precision) for c in found.cases] == [
        ("ddp", "16-mixed"),
        ("ddp", "bf16-mixed"),
        ("fsdp2", "bf16-mixed"),
    ]
    assert [skip.why for skip in found.skipped] == [
        "precision 16-mixed does not run under fsdp2; use bf16-mixed or 32-true"
    ]


def test_buckets_multiply_only_strategies_that_have_them():
    found = expand(Matrix(strategies=("ddp", "fsdp2"), devices=(2,), bucket_cap_mb=(5.0, 50.0)), CPU)
    assert [c.strategy_options for c in found.cases if c.strategy == "ddp"] == [
        (("bucket_cap_mb", 5.0),),
        (("bucket_cap_mb", 50.0),),
    ]
    assert len([c for c in found.cases if c.strategy == "fsdp2"]) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(scaling=("strong",)), "--global_batch"),
        (dict(scaling=("both",)), "weak, strong"),
        (dict(sizes=("huge",)), "gpt2-124m"),
        (dict(devices=(0,)), "devices 0"),
    ],
)
def test_a_matrix_that_makes_no_sense_names_the_remedy(fields, words):
    with pytest.raises(UserError, match=words):
        Matrix(**fields)


def test_every_ablation_turns_one_switch_of_the_cases_that_have_it():
    found = expand(Matrix(devices=(2,), accumulate=(4,), precision=("32-true",)), CPU)
    add_ablations(found, ABLATIONS, CPU)
    variants = {(c.strategy, c.variant) for c in found.cases if c.variant}
    assert ("ddp", "no_sync off") in variants
    assert ("fsdp2", "no_sync off") in variants
    assert ("ddp", "overlap off") in variants
    assert ("fsdp2", "overlap off") not in variants
    assert {v for s, v in variants if v.startswith("units")} == {
        "units blocks", "units model", "units blocks, reshard_after_forward off"
    }  # fmt: skip
    assert {v for s, v in variants if "bucket" in v} == {f"overlap on, bucket {size} MB" for size in (1, 5, 100)}
    assert {
        ("ddp", "recompute full"),
        ("ddp", "compile off"),
        ("ddp", "CUDA graph off"),
        ("ddp", "precision bf16-mixed"),
    } <= variants


def test_no_sync_needs_accumulation_and_says_so():
    found = expand(Matrix(devices=(2,)), CPU)
    add_ablations(found, ["no_sync"], CPU)
    assert not [c for c in found.cases if c.variant]
    assert "accumulation" in found.skipped[-1].why


def test_strategy_options_are_given_by_class_path():
    case = Case("tiny", "ddp", 2, 16, 4).with_strategy_option("no_sync", False, "no_sync off")
    words = fit_arguments(case, Setting(), "folder", "tag")
    place = words.index("--trainer.strategy")
    assert words[place : place + 4] == [
        "--trainer.strategy",
        "lit_gpt_dist.parallel.DDP",
        "--trainer.strategy.no_sync",
        "false",
    ]


def test_fit_is_told_the_batch_the_place_and_what_to_leave_out():
    words = fit_arguments(
        Case("tiny", "fsdp2", 4, 16, 2, shape=(("layers", 3),)),
        Setting(steps=10, fit_options=("--x", "1")),
        "here",
        "name",
    )
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options["--data.global_batch"] == "128"
    assert options["--model.layers"] == "3"
    assert options["--trainer.max_steps"] == "10"
    assert options["--trainer.default_root_dir"] == "here"
    assert options["--x"] == "1"
    assert "--trainer.precision" not in options


def test_the_hash_is_of_what_runs_and_not_of_what_it_is_called():
    case, setting = Case("tiny", "ddp", 2, 16, 4), Setting()
    same = dataclasses.replace(case, variant="no_sync off")
    assert case_hash(case, setting) == case_hash(same, setting)
    others = [dataclasses.replace(case, micro=8), dataclasses.replace(case, strategy_options=(("no_sync", False),))]
    others_setting = [Setting(steps=21), Setting(memory_fraction=0.5), Setting(fit_options=("--optim.lr", "1"))]
    hashes = {
        case_hash(case, setting),
        *(case_hash(c, setting) for c in others),
        *(case_hash(case, s) for s in others_setting),
    }
    assert len(hashes) == 6


def test_names_of_folders_tell_cases_apart():
    found = expand(
        Matrix(devices=(1, 2), micro=(8, 16), precision=("32-true", "bf16-mixed"), recompute=("none", "full")), CPU
    )
    add_ablations(found, ABLATIONS, CPU)
    assert len({case.name for case in found.cases}) == len(found.cases)


def test_recomputation_in_some_blocks_is_a_case_of_its_own_that_tells_fit_both_options(tmp_path):
    kinds = merged_options({"recompute": "selective,selective:6,full:6"})["recompute"]
    cases = expand(Matrix(sizes=("big",), strategies=("ddp",), recompute=kinds), CPU).cases
    assert [case.name.partition("_recompute-")[2] for case in cases] == ["selective", "selective-6", "full-6"]
    words = [" ".join(fit_arguments(case, Setting(), "folder", "tag")) for case in cases]
    assert "--model.recompute selective --model.recompute_blocks 6" in words[1]
    assert "recompute_blocks" not in words[0]
    lines = [Runner(tmp_path, [], Setting(), {}, 1.0).line(case, 0) for case in cases]
    assert [(line["recompute"], line.get("recompute_blocks")) for line in lines] == [
        ("selective", None),
        ("selective", 6),
        ("full", 6),
    ]


@pytest.mark.parametrize("wrong", ["half", "half:6", "none:6", "full:0", "full:", "full:1.5", "selective:-2"])
def test_recomputation_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(UserError, match=f"^recompute {wrong} "):
        merged_options({"recompute": f"full,{wrong}"})


def test_rounds_are_interleaved_and_every_second_goes_backwards():
    a, b = Case("tiny", "ddp", 1, 1, 1), Case("tiny", "ddp", 2, 1, 1)
    assert interleaved([a, b], 3) == [(a, 0), (b, 0), (b, 1), (a, 1), (a, 2), (b, 2)]


def test_time_left_takes_each_cases_own_time_where_it_is_known():
    a, b = Case("tiny", "ddp", 1, 1, 1), Case("tiny", "ddp", 2, 1, 1)
    assert time_left({}, [(a, 0)]) is None
    assert time_left({a: [10.0]}, [(a, 1), (b, 0)]) == 20.0
    assert time_left({a: [10.0], b: [30.0, 50.0]}, [(a, 1), (b, 0)]) == 50.0


def test_the_command_line_wins_over_the_file_and_lists_are_lists(tmp_path):
    path = tmp_path / "bench.yaml"
    path.write_text("sizes: [tiny, baby]\ndevices: 1,2\nrounds: 5\ncompile: [true]\n")
    options = merged_options({"config": str(path), "rounds": 2, "micro": "4,8"})
    assert (options["sizes"], options["devices"], options["rounds"], options["micro"]) == (
        ["tiny", "baby"],
        [1, 2],
        2,
        [4, 8],
    )
    assert options["compile"] == ["true"]


def test_a_global_batch_alone_means_strong_scaling():
    assert merged_options({"global_batch": 64})["scaling"] == ["strong"]
    assert merged_options({})["scaling"] == ["weak"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("size: tiny", "did you mean sizes"),
        ("- tiny", "not a mapping"),
        ("devices: two", "'two' is not a whole number"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_file_with_a_mistake_is_named(tmp_path, text, words):
    path = tmp_path / "bench.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        merged_options({"config": str(path)})


def test_every_configuration_of_the_repository_expands():
    files = sorted((Path(__file__).parents[2] / "configs" / "bench").glob("*.yaml"))
    assert files
    for path in files:
        options = merged_options({"config": str(path)})
        found = expand(Matrix(**{name: options[name] for name in Matrix.__dataclass_fields__}), CPU)
        add_ablations(found, ABLATIONS if options["ablation"] == ["all"] else options["ablation"], CPU)
        assert found.cases, path


def test_gpus_that_are_not_there_and_a_search_that_needs_them_are_a_users_error(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    root = str(tmp_path / "none")
    with pytest.raises(UserError, match="accelerator gpu: this machine has no usable GPU"):
        main(["--accelerator", "gpu", "--root", root])
    with pytest.raises(UserError, match="a CPU has no such limit"):
        main(["--accelerator", "cpu", "--find", "largest", "--root", root])
    with pytest.raises(UserError, match="a CPU has none to limit"):
        main(["--accelerator", "cpu", "--memory_fraction", "0.5", "--root", root])
    assert not (tmp_path / "none").exists()


def test_a_dry_run_lists_commands_and_writes_nothing(tmp_path, capsys):
    assert (
        main(
            ["--accelerator", "cpu", "--sizes", "tiny", "--devices", "2", "--dry_run", "--root", str(tmp_path / "none")]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert out.count("lit-gpt-dist fit") == 2
    assert "single is one card by definition" in out
    assert not (tmp_path / "none").exists()
