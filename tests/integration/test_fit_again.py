"""Going on, and running again: what the saved configuration, ``last`` and a run that is already at its end do."""

import os
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
from helpers.commands import COMMAND, SMALL, clean_environment, here, results

from lit_gpt_dist.runs import launched, name_run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_a_run_that_is_at_its_end_has_nothing_to_do(text: Path, tmp_path: Path) -> None:
    common = ["fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", str(tmp_path)]
    assert here(*common).code == 0
    for steps in ("4", "3"):
        again = here(*common, "--ckpt_path", "last", "--trainer.max_steps", steps)
        assert again.code == 0, again.text
        assert "nothing to do: the checkpoint is at step 4" in again.out
    assert len(results(tmp_path)) == 1, "no steps, no line"
    assert len(list(tmp_path.glob("*/config.yaml"))) == 1, "and no folder"


def test_nothing_that_an_earlier_run_wrote_is_removed(text: Path, tmp_path: Path) -> None:
    """However the folder is spelled, and whoever finds nothing to do."""
    common = ["--data.corpus", str(text), "--trainer.default_root_dir"]
    assert here("fit", *SMALL, *common, str(tmp_path / "logs"), "--tag", "one").code == 0
    (tmp_path / "beside").mkdir()
    before = set((tmp_path / "logs").rglob("*"))
    spelled = f"{tmp_path}/beside/../logs"
    for command in ("validate", "test", "fit"):
        assert here(command, *SMALL, *common, spelled, "--ckpt_path", "last").code == 0
    assert here("validate", *SMALL, *common, spelled, "--ckpt_path", str(tmp_path / "none")).code == 2
    assert set((tmp_path / "logs").rglob("*")) == before


def test_no_folder_is_the_usual_one(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert here("fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", "null").code == 0
    assert len(results(tmp_path / "logs")) == 1


def test_a_name_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for expected in ("x", "x-2"):
        monkeypatch.delenv("LIT_GPT_DIST_RUN", raising=False)
        assert name_run(tmp_path, "x", "tiny") == (expected, True)
        assert (tmp_path / expected).is_dir(), "before anything is written there"
    assert name_run(tmp_path, "x", "tiny") == ("x-2", False), "one that was handed over is not new"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux's /proc")
def test_ranks_of_torchrun_name_a_run_by_when_that_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launched() < launched(), "alone: now"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    assert launched() == launched() < datetime.now(), "what started this process was there before"


def test_a_resumed_run_keeps_its_global_batch_whatever_the_micro_batch_unless_another_is_given(
    text: Path, tmp_path: Path
) -> None:
    common = ["fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", str(tmp_path)]
    assert here(*common).code == 0  # micro 4, and so is the global batch
    assert here(*common, "--data.micro_batch", "2", "--ckpt_path", "last", "--trainer.max_steps", "6").code == 0
    other = ("--data.micro_batch", "2", "--data.global_batch", "6", "--ckpt_path", "last", "--trainer.max_steps", "7")
    assert here(*common, *other).code == 0
    assert [(line["start"], line["global_batch"], line["accum"]) for line in results(tmp_path)] == [
        (0, 4, 1),
        (4, 4, 2),
        (6, 6, 3),
    ]


def test_saved_configuration_goes_on_from_another_folder_and_names_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink(text, "corpus.txt")
    common = ["fit", *SMALL, "--data.corpus", "corpus.txt", "--trainer.default_root_dir", "runs"]
    assert here(*common, "--tag", "one").code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    on = here("fit", "--config", "../runs/one/config.yaml", "--ckpt_path", "last", "--trainer.max_steps", "6")
    assert on.code == 0, on.text
    assert "2 steps from step 4 of runs/one" in on.out, "whose checkpoint it is stands in the first lines"
    assert [line["start"] for line in results(tmp_path / "runs")] == [0, 4]
    assert not list((tmp_path / "elsewhere").iterdir()), "nothing is left where the command was typed"


def test_two_experiments_in_one_folder_each_go_on_from_their_own_checkpoint(text: Path, tmp_path: Path) -> None:
    common = ["fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", str(tmp_path)]
    on = [*common, "--ckpt_path", "last", "--trainer.max_steps", "6"]
    assert "starting from step 0" in here(*common, "--tag", "a", "--ckpt_path", "last").out
    begun = here(*common, "--tag", "b", "--ckpt_path", "last", "--trainer.max_steps", "5")
    assert f"no checkpoint of tag b in {tmp_path} yet (--ckpt_path {tmp_path}/checkpoints/step-00000004" in begun.out
    assert here(*common, "--model.width", "32", "--trainer.max_steps", "3").code == 0
    newest = tmp_path / "checkpoints" / "step-00000003"

    ours = here(*on, "--tag", "a")
    assert f"2 steps from step 4 of {tmp_path}/a" in ours.out, ours.text
    assert f"{newest} is newer, but of another tag (--ckpt_path {newest} takes it)" in ours.err
    wide = here(*on, "--trainer.max_steps", "8")
    assert f"2 steps from step 6 of {tmp_path}/a-2" in wide.out, wide.text
    narrow = here(*on, "--model.width", "32")
    assert f"{tmp_path}/checkpoints/step-00000008 is newer, but of another model" in narrow.err, narrow.text
    assert [line["start"] for line in results(tmp_path)] == [0, 0, 0, 4, 6, 3]
    measured = here("validate", *common[1:], "--ckpt_path", "last", "--tag", "b")
    assert f"{tmp_path}/checkpoints/step-00000005 on" in measured.out, measured.text
    assert here("validate", *common[1:], "--ckpt_path", "last", "--tag", "c").code == 2


def test_windows_shorter_than_the_models_context_are_counted_as_they_are(text: Path, tmp_path: Path) -> None:
    common = ["fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", str(tmp_path)]
    ended = here(*common, "--data.context", "16", "--data.global_batch", "8")
    assert ended.code == 0, ended.text
    assert "128 tokens per step (windows of 16)" in ended.out
    (line,) = results(tmp_path)
    assert (line["context"], line["tokens_per_step"]) == (16, 8 * 16)
    assert line["tok_s"] == pytest.approx(128 / (line["step_ms"] / 1000))


def test_a_runs_folder_is_weights_but_no_checkpoint(text: Path, tmp_path: Path) -> None:
    common = ["fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", str(tmp_path)]
    assert here(*common, "--tag", "one").code == 0
    assert here("generate", str(tmp_path / "one"), "--tokens", "3", "--prompt", "a", "--device", "cpu").code == 0
    refused = here(*common, "--ckpt_path", str(tmp_path / "one"))
    assert refused.code == 2
    assert "is no checkpoint" in refused.err
    assert "step-00000004" in refused.err, "the one that was meant is offered"


def test_a_reader_that_leaves_does_not_end_the_run(text: Path, tmp_path: Path) -> None:
    options = [
        *SMALL,
        "--data.corpus",
        str(text),
        "--trainer.default_root_dir",
        str(tmp_path),
        "--trainer.max_steps",
        "30",
    ]
    process = subprocess.Popen(
        [*COMMAND, "fit", *options, "--trainer.log_every_n_steps", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment(PYTHONUNBUFFERED="1"),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    try:
        assert process.wait(timeout=120) == 0, process.stderr.read()
    finally:
        process.kill()
        process.stderr.close()
    assert results(tmp_path)[0]["steps"] == 30


def test_a_group_of_options_that_is_a_number_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("trainer: 5\n")
    refused = here("fit", "--config", str(tmp_path / "f.yaml"))
    assert refused.code == 2
    assert "trainer 5 is not a group of options" in refused.err


def test_a_fast_dev_run_leaves_nothing(text: Path, tmp_path: Path) -> None:
    ended = here(
        "fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", str(tmp_path / "logs"), "--trainer.fast_dev_run", "2",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    assert "fast_dev_run: nothing was written" in ended.out
    assert not list(tmp_path.rglob("*.jsonl")) + list(tmp_path.rglob("step-*")) + list(tmp_path.rglob("*.safetensors"))
