"""``fit`` as a command: what it prints, what it leaves, and that its saved configuration is the run."""

from pathlib import Path

import pytest
from helpers.commands import COMMAND, SMALL, Ended, forked, here, results, run, torchrun
from helpers.training import worst

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FIELDS = (
    "tag mode size world accum micro global_batch context step_ms tok_s mem_gib host_gib losses start val_loss seed precision "
    "recompute recompute_blocks bucket_cap_mb units params tokens_per_step mfu mfu_half_attention device corpus corpus_hash git_revision versions "
    "time command"
)


def fit(text: Path, root: Path, *options: str) -> Ended:
    ended = here("fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", str(root), *options)
    assert ended.code == 0, ended.text
    return ended


def test_saved_configuration_runs_the_same_run_again(text: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    fit(text, first, "--tag", "one", "--data.global_batch", "8", "--trainer.max_steps", "6", "--optim.lr", "3e-3")
    again = here(
        "fit", "--config", str(first / "one" / "config.yaml"), "--trainer.default_root_dir", str(tmp_path / "again")
    )
    assert again.code == 0, again.text
    (one,), (two,) = results(first), results(tmp_path / "again")
    assert two["losses"] == one["losses"]
    assert len(one["losses"]) == 6
    assert two["val_loss"] == one["val_loss"]
    different = {name for name in one if one[name] != two[name]}
    assert different <= {
        "step_ms",
        "tok_s",
        "host_gib",
        "paused_s",
        "start_s",
        "time",
        "command",
        "run_dir",
        "config",
    } | {name for name in one if name.endswith("_ms")}


def test_results_line_has_its_fields_and_its_rates_agree(text: Path, tmp_path: Path) -> None:
    fit(text, tmp_path, "--data.global_batch", "16", "--trainer.max_steps", "10")
    (line,) = results(tmp_path)
    assert [name for name in FIELDS.split() if name not in line] == []
    assert (line["mode"], line["world"], line["micro"], line["accum"], line["start"]) == ("single", 1, 4, 4, 0)
    assert 0 < line["start_s"]["training"] < line["start_s"]["first_step"]
    assert line["tokens_per_step"] == 16 * 32
    assert line["tok_s"] == pytest.approx(line["tokens_per_step"] / (line["step_ms"] / 1000), rel=1e-9)
    assert line["mem_gib"] is None, "there is no device memory on a CPU"
    assert line["mfu"] is None, "the peak of this CPU is not known"
    assert line["host_gib"] > 0


def test_start_and_end_say_what_decides_the_run_and_what_to_type_next(text: Path, tmp_path: Path) -> None:
    some = ("--model.recompute", "selective", "--model.recompute_blocks", "1")
    ended = fit(text, tmp_path, "--data.global_batch", "16", "--tag", "seen", "--sample_tokens", "20", *some)
    said = " ".join(ended.out.split())
    assert "global 16 = micro 4 × accumulate 4 × 1 rank; 512 tokens per step" in said
    for word in (
        "105.5K parameters",
        "recompute selective in 1 of 2 blocks",
        "tokens/s",
        "GiB",
        "results.jsonl",
        "weights.safetensors",
        "tensorboard --logdir",
    ):
        assert word in said, word
    assert ended.err == ""
    assert (tmp_path / "seen" / "weights.safetensors").is_file()


def test_quiet_prints_nothing_and_a_taken_tag_gets_a_number(text: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert fit(text, tmp_path, "--tag", "same", "--quiet", "true").out == ""
    assert (tmp_path / "same").is_dir()
    assert (tmp_path / "same-2").is_dir()


def test_another_vocabulary_is_refused_at_a_resume_and_nothing_is_overwritten(text: Path, tmp_path: Path) -> None:
    fit(text, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    other = tmp_path.parent / "other.txt"
    other.write_text("абвгд " * 2000, encoding="utf-8")
    refused = here(
        "fit", *SMALL, "--data.corpus", str(other), "--trainer.default_root_dir", str(tmp_path),
        "--ckpt_path", "last", "--trainer.max_steps", "8",
    )  # fmt: skip
    assert refused.code == 2, refused.text
    assert len(refused.err.strip().splitlines()) == 1, refused.err
    assert "vocabulary" in refused.err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_new_run_starts_from_given_weights_and_refuses_others(text: Path, tmp_path: Path) -> None:
    fit(text, tmp_path, "--tag", "first", "--trainer.max_steps", "20", "--optim.lr", "3e-3")
    weights = str(tmp_path / "first" / "weights.safetensors")
    validated = fit(text, tmp_path, "--tag", "second", "--model.init_from", weights, "--optim.lr", "1e-9")
    first, second = results(tmp_path)
    assert second["start"] == 0
    assert second["val_loss"] == pytest.approx(first["val_loss"], abs=1e-4), validated.text
    for option in ("--model.init_from", "--ckpt_path"):
        one = here(
            "validate", *SMALL[:2], "--data.corpus", str(text), "--data.val_windows", "16", "--trainer.default_root_dir",
            str(tmp_path), option, weights,
        )  # fmt: skip
        assert one.code == 0, one.text
        assert f"loss {first['val_loss']:.4f} nats per token" in one.out
        assert f"{weights} on {text.name} (16 windows)" in one.out
    few = tmp_path / "few.txt"
    few.write_text("the same\n" * 200)  # fewer characters than the weights know
    options = ["--data.corpus", str(few), "--model.init_from", weights, "--trainer.default_root_dir", str(tmp_path)]
    assert here("fit", *SMALL, *options, "--tag", "few").code == 0
    assert results(tmp_path)[-1]["vocab"] == first["vocab"]
    common = ["fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", str(tmp_path)]
    for options, words in (
        (["nowhere"], "nowhere does not exist"),
        ([weights, "--model.width", "32"], "width is 32, but 64"),
        ([weights, "--data.tokenizer", "byte"], "is not the corpus's"),
    ):
        refused = here(*common, "--model.init_from", *options)
        assert refused.code == 2, refused.text
        assert words in refused.err
        assert len(refused.err.strip().splitlines()) == 1


def test_both_launchers_run_two_ranks_on_the_same_curve(text: Path, tmp_path: Path) -> None:
    options = [
        "fit", *SMALL, "--data.corpus", str(text), "--data.global_batch", "16", "--trainer.max_steps", "8", "--export", "false",
    ]  # fmt: skip
    two = ["--trainer.devices", "2", "--trainer.strategy"]
    one = forked(*options, "--tag", "one", "--trainer.default_root_dir", str(tmp_path))
    assert one.code == 0, one.text
    for name, command in {
        "own": [*COMMAND, *options, *two, "ddp"],
        "torchrun": [*torchrun(2), "-m", "lit_gpt_dist", *options, *two, "fsdp2"],
    }.items():
        ended = run(*command, "--tag", name, "--trainer.default_root_dir", str(tmp_path))
        assert ended.code == 0, ended.text
        assert ended.out.count("tokens per step") == 1, "rank 0 alone prints"
    lines = {line["tag"]: line for line in results(tmp_path)}
    assert [(lines[name]["mode"], lines[name]["world"]) for name in lines] == [("single", 1), ("ddp", 2), ("fsdp2", 2)]
    for name in ("own", "torchrun"):
        assert lines[name]["tok_s"] == pytest.approx(512 / (lines[name]["step_ms"] / 1000), rel=1e-9), (
            "not times the ranks"
        )
        assert worst(lines[name]["losses"], lines["one"]["losses"]) <= 1e-6
