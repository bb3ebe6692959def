"""The page on use from Python holds a program that runs."""

import re
import sys
from pathlib import Path

from helpers.commands import run

ROOT = Path(__file__).parents[2]


def test_the_program_on_the_page_trains_and_saves(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), flags=re.S)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    program = program.replace("Trainer(\n", 'Trainer(\n    accelerator="cpu",\n')  # also where there is a GPU
    ended = run(sys.executable, "-c", program, cwd=tmp_path)
    assert ended.code == 0, ended.text
    loss, validation = map(float, ended.out.strip().splitlines()[-1].split())
    assert 0 < loss < 6
    assert 0 < validation < 6
    assert (tmp_path / "logs" / "from-python" / "checkpoints" / "last").exists()
