"""What a run says when it starts, while it goes and when it ends before its last step."""

import re
import shlex
import signal
from pathlib import Path

import pytest
from helpers.commands import SMALL, here
from jsonargparse import Namespace

from lit_gpt_dist.callbacks.profiler import beyond_the_run
from lit_gpt_dist.callbacks.progress import describe
from lit_gpt_dist.callbacks.reading import Reading
from lit_gpt_dist.callbacks.signals import SignalCallback
from lit_gpt_dist.checks import check_launcher
from lit_gpt_dist.errors import EXIT_INTERRUPTED, UserError
from lit_gpt_dist.runs import describe_end

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
READING = Reading(60, 2.77, 1e-3, None, None, None, None)


def options(text: Path, root: Path, *more: str) -> list[str]:
    return [
        "fit",
        *SMALL,
        "--data.corpus",
        str(text),
        "--trainer.default_root_dir",
        str(root),
        "--export",
        "false",
        *more,
    ]


def command_in(output: str) -> list[str]:
    """What ``to go on`` says to type, without the program's name."""
    found = re.search(r"to go on:\n  (.*)", output)
    assert found is not None, output
    return shlex.split(found[1])[1:]


def interrupted(self: SignalCallback, *_: object) -> None:
    """In the place of a hook: Ctrl+C."""
    assert self.watch is not None
    self.watch.receive(signal.SIGINT)


def test_ctrl_c_says_where_the_run_was_saved_and_its_command_goes_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as during:
        during.setattr(SignalCallback, "on_train_batch_start", interrupted)
        ended = here(*options(text, tmp_path))
    saved = tmp_path / "checkpoints" / "step-00000001"
    assert ended.code == EXIT_INTERRUPTED, ended.text
    assert f"stopped after step 1; saved as {saved}; to go on:" in ended.out
    assert "step-00000004" not in ended.text
    on = here(*command_in(ended.out))
    assert on.code == 0, on.text
    assert "3 steps from step 1" in on.out


def test_quiet_leaves_stdout_empty_and_still_says_how_to_go_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SignalCallback, "on_train_batch_start", interrupted)
    ended = here(*options(text, tmp_path, "--quiet", "true"))
    assert (ended.code, ended.out) == (EXIT_INTERRUPTED, "")
    assert "SIGINT: saving after this step, then ending; once more ends at once" in ended.err
    assert "stopped after step 1; saved as" in ended.err
    assert "--ckpt_path" in command_in(ended.err)


def test_a_run_that_max_time_ends_says_so_and_its_command_does_not_end_at_once(text: Path, tmp_path: Path) -> None:
    ended = here(*options(text, tmp_path, "--trainer.max_time", "00:00:00:01", "--trainer.max_steps", "100000"))
    assert ended.code == 0, ended.text
    found = re.search(
        r"ended after step ([\d,]+) of 100,000: max_time is over; saved as .*step-(\d+); to go on", ended.out
    )
    assert found is not None, ended.text
    step = int(found[2])
    assert found[1] == f"{step:,}"
    on = here(*command_in(ended.out), "--trainer.max_steps", str(step + 2))
    assert f"after {step + 2:,} steps" in on.out, on.text
    assert "ended after" not in on.out


def test_only_an_untagged_run_beside_another_of_its_shape_is_warned(text: Path, tmp_path: Path) -> None:
    def warned(*more: str) -> bool:
        ended = here(*options(text, tmp_path, "--trainer.max_steps", "1", *more))
        assert ended.code == 0, ended.text
        return "holds checkpoints of another run" in ended.err

    assert not warned()
    assert warned()
    assert not warned("--tag", "a")
    assert not warned("--model.width", "32")
    assert not warned("--ckpt_path", "last", "--trainer.max_steps", "2")


def test_a_span_that_the_run_does_not_reach_is_told_beforehand() -> None:
    assert beyond_the_run((6, 8), 0, 8) is None
    assert beyond_the_run((11, 60), 0, -1) is None
    assert beyond_the_run((6, 12), 0, 8) == "the run ends after step 8; steps 6 to 8 are traced"
    for span in ((11, 60), (20, 24)):
        assert "nothing is traced" in (said := beyond_the_run(span, 0, 8) or "")
        assert "--profile 6-8" in said
    assert "--profile 11-12" in (beyond_the_run((3, 5), 10, 12) or ""), "steps that an earlier run took"


def test_a_validation_loss_of_an_earlier_step_says_of_which() -> None:
    assert describe(READING, 2.8103, 54) == "loss 2.7700  val 2.8103 (step 54)"
    assert describe(READING, 2.8103, 60) == "loss 2.7700  val 2.8103"
    assert describe(READING, None, None) == "loss 2.7700"


def test_several_machines_without_a_launcher_are_refused_with_the_command_that_starts_them(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = here(*options(text, tmp_path, "--trainer.num_nodes", "2", "--trainer.devices", "3"))
    assert refused.code == 2
    assert "trainer.num_nodes 2, but there is no launcher" in refused.err
    assert "torchrun --nnodes 2 --nproc-per-node 3 --rdzv-backend c10d" in refused.err
    assert f"-m lit_gpt_dist fit {shlex.join(SMALL)}" in refused.err
    trainer = Namespace(num_nodes=2, devices="auto", plugins=None)
    for variable, value in (("TORCHELASTIC_RUN_ID", "x"), ("SLURM_NTASKS", "2")):
        with pytest.raises(UserError, match="no launcher"):
            check_launcher(trainer)
        with monkeypatch.context() as launched:
            launched.setenv(variable, value)
            check_launcher(trainer)


def test_processes_of_one_machine_do_not_wait_at_another_ones_address(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Namespace(num_nodes=1, devices=2, plugins=None)
    for own in ("127.0.0.1", "localhost"):
        monkeypatch.setenv("MASTER_ADDR", own)
        check_launcher(trainer)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # an address that nobody has (RFC 5737)
    with pytest.raises(UserError, match=r"MASTER_ADDR 192\.0\.2\.1 is not an address of this machine"):
        check_launcher(trainer)
    check_launcher(Namespace(num_nodes=1, devices=1, plugins=None))  # alone: nobody to meet


def test_machines_started_by_hand_need_all_that_lets_them_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the address alone each opens a port of its own as the first machine, and waits there for the others."""
    trainer = Namespace(num_nodes=2, devices="auto", plugins=None)
    monkeypatch.setenv("MASTER_ADDR", "one")
    with pytest.raises(UserError, match="MASTER_ADDR set by hand, but without MASTER_PORT and NODE_RANK") as refused:
        check_launcher(trainer)
    assert "or type on each (HOST: the first one) torchrun --nnodes 2" in str(refused.value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT set by hand, but without NODE_RANK"):
        check_launcher(trainer)
    monkeypatch.setenv("NODE_RANK", "1")
    check_launcher(trainer)


def test_a_rank_that_a_signal_ended_has_left_no_message_to_look_for() -> None:
    assert describe_end(1, 3) == "rank 1 ended with exit code 3; see its message above"
    assert describe_end(1, -9) == "rank 1 was killed by SIGKILL; often the system's, out of memory"
    assert describe_end(2, -15) == "rank 2 was killed by SIGTERM"
