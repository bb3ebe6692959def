"""torchrun restarts ranks of which one died: they go on from the last complete checkpoint, on the same curve."""

from pathlib import Path

from helpers.commands import SMALL, forked, results, run, torchrun

TESTS = str(Path(__file__).parents[1])


def test_a_killed_rank_is_restarted_and_the_curve_goes_on(text: Path, tmp_path: Path) -> None:
    command = [
        *torchrun(2), "--max-restarts", "1", "-m", "lit_gpt_dist", "fit", *SMALL, "--data.corpus", str(text),
        "--trainer.strategy", "ddp", "--trainer.devices", "2", "--trainer.max_steps", "12", "--checkpoint.every_n_steps", "4",
        "--ckpt_path", "last", "--export", "false",
    ]  # fmt: skip
    whole = forked(
        "fit", *SMALL, "--data.corpus", str(text), "--data.global_batch", "8", "--trainer.max_steps", "12", "--export", "false",
        "--trainer.default_root_dir", str(tmp_path / "whole"),
    )  # fmt: skip
    assert whole.code == 0, whole.text
    fault = [
        "--trainer.callbacks+=helpers.faults.DieOnce",
        "--trainer.callbacks.rank",
        "1",
        "--trainer.callbacks.step",
        "6",
    ]
    died = run(
        *command, *fault, "--trainer.default_root_dir", str(tmp_path / "died"), PYTHONPATH=TESTS, timeout_seconds=200
    )
    assert died.code == 0, died.text
    (reference,), (resumed,) = results(tmp_path / "whole"), results(tmp_path / "died")
    assert resumed["start"] == 4, "the checkpoint of step 4 is the last complete one before step 6"
    gaps = [abs(a - b) for a, b in zip(reference["losses"][4:], resumed["losses"], strict=True)]
    assert max(gaps) <= 1e-6, f"worst difference {max(gaps):.1e}"
