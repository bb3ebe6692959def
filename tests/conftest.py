"""What every test shares: one thread a process, no run's name left over, and the text that small runs train on."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a test's processes share the cores already
os.environ.setdefault(
    "GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"
)  # ranks of a test meet on this machine

ROOT = Path(__file__).parents[1]
SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"


@pytest.fixture(autouse=True)
def _no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run inside the test process names itself in the environment; the next one must not inherit the name."""
    monkeypatch.setenv("LIT_GPT_DIST_RUN", "")
    monkeypatch.delenv("LIT_GPT_DIST_RUN")


@pytest.fixture(scope="session")
def text() -> Path:
    """11 kB of English that every checkout has."""
    return ROOT / "LICENSE"


@pytest.fixture(scope="session")
def shakespeare() -> Path:
    if not SHAKESPEARE.is_file():
        pytest.skip(f"{SHAKESPEARE.name} is not beside this checkout")
    return SHAKESPEARE
