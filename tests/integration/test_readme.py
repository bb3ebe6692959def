"""README.md is true: its commands run, its links lead somewhere, and every page in docs/ is within two hops."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers.commands import COMMAND, Ended, forked, run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")
# appended to every training, so that the commands take seconds: two steps of small windows
SHORTER = [
    "--trainer.accelerator", "cpu", "--model.size", "tiny", "--model.context", "32", "--data.global_batch", "8",
    "--data.micro_batch", "4", "--data.val_windows", "8", "--sample_tokens", "8",
]  # fmt: skip


def commands() -> list[str]:
    """The lines of README's ``sh`` blocks, in order."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def shortened(command: str) -> list[str] | None:
    """What the test runs for a command of the README; None for the one that runs this very test."""
    words = shlex.split(command)
    if words[0] == "scripts/test.sh":
        return None
    if words[0] == "scripts/fit.sh":  # installs nothing here: the tests' installation holds what it needs
        words[:1] = ["bash", str(ROOT / "scripts" / "fit.sh")]
    elif words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    else:
        words[:1] = [sys.executable, "-m", "lit_gpt_dist"]
    if "fit" in words or "fit.sh" in words[1]:
        steps = "8" if "--profile" in words else "4" if "last" in words else "2"
        return [*words, *SHORTER, "--trainer.max_steps", steps]
    if "validate" in words:
        return [*words, *SHORTER]
    if "bench" in words:
        return [*words, "--strategies", "single", "--devices", "1", "--steps", "4", "--rounds", "1"]
    return words


@pytest.mark.timeout(600)
def test_commands_of_the_readme_run_in_the_order_they_stand(tmp_path: Path) -> None:
    for name in ("configs", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    found = commands()
    assert found[:2] == ["scripts/fit.sh", "scripts/test.sh"]
    for command in found:
        words = shortened(command)
        if words is not None:
            ended = run_quickly(words, tmp_path)
            assert ended.code == 0, f"{command}\n{ended.text}"


def run_quickly(words: list[str], folder: Path) -> Ended:
    """Without importing everything once more, where the command is one process."""
    if words[: len(COMMAND)] == COMMAND and "--trainer.devices" not in words:
        return forked(*words[len(COMMAND) :], cwd=folder, timeout_seconds=180)
    return run(*words, cwd=folder, timeout_seconds=180)


def test_links_lead_somewhere_and_every_page_is_within_two_hops() -> None:
    reached = hop({ROOT / "README.md"})
    assert set((ROOT / "docs").glob("*.md")) <= reached | hop(reached)


def hop(pages: set[Path]) -> set[Path]:
    """The pages that these link to; each link must lead to a file, each anchor to a heading."""
    found = set()
    for page in pages:
        for target, anchor in LINK.findall(page.read_text()):
            path = (page.parent / target).resolve()
            assert path.exists(), f"{page.name} links to {target}"
            if path.suffix == ".md":
                found.add(path)
                assert not anchor or anchor[1:] in headings(path), f"{page.name} links to {target}{anchor}"
    return found


def headings(page: Path) -> set[str]:
    lines = [line.lstrip("#").strip().lower() for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line).replace(" ", "-") for line in lines}


def test_files_named_in_the_documentation_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"`((?:tests|lit_gpt_dist|configs|scripts)/[\w/.-]+\.\w+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
