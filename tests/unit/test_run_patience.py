"""A rank that waits for others says so, and ends with one line where they do not come."""

import time
from types import SimpleNamespace

import pytest
from torch.distributed import DistStoreError

from lit_gpt_dist.errors import RanksMissing
from lit_gpt_dist.parallel.patience import patience
from lit_gpt_dist.runs import follow_launcher


@pytest.fixture(autouse=True)
def meeting_place(monkeypatch):
    for name, value in (("MASTER_ADDR", "node7"), ("MASTER_PORT", "29500"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)


def wait_for(words, capsys):
    told = ""
    deadline = time.monotonic() + 60
    while words not in told and time.monotonic() < deadline:
        time.sleep(0.01)
        told += capsys.readouterr().err
    return told


def test_a_long_wait_is_told_once_with_what_to_look_at(capsys):
    with patience(0, 4, 620, seconds=0.01):
        told = wait_for("node7:29500", capsys)
        time.sleep(0.05)
    assert told.count("rank 0 waits for the other 3 at node7:29500, 620 s in all; start all 4") == 1
    assert capsys.readouterr().err == ""


def test_a_short_wait_is_not_told_and_neither_by_every_rank_of_a_machine(capsys, monkeypatch):
    with patience(0, 4, 620, seconds=60):
        pass
    monkeypatch.setenv("LOCAL_RANK", "1")
    with patience(1, 4, 620, seconds=0.0):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_ranks_that_never_come_are_a_users_mistake():
    told = "the 4 ranks did not come together at node7:29500 .waited 620 s.; start all 4"
    with pytest.raises(RanksMissing, match=told), patience(0, 4, 620):
        raise DistStoreError("Timed out after 620 seconds waiting for clients. 1/4 clients joined.")


@pytest.mark.parametrize(
    ("local", "world", "devices", "nodes", "found"),
    [
        ("2", "2", "auto", 1, (2, 1)),
        ("4", "8", "auto", 1, (4, 2)),
        ("4", "8", "auto", 2, (4, 2)),
        ("4", "8", 2, 1, (2, 1)),  # what is given stays, and is answered where it does not fit
        (None, None, "auto", 1, ("auto", 1)),
        ("", "x", "auto", 1, ("auto", 1)),
    ],
)
def test_ranks_that_were_started_say_how_many_they_are(monkeypatch, local, world, devices, nodes, found):
    for name, value in (("LOCAL_WORLD_SIZE", local), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    trainer = SimpleNamespace(devices=devices, num_nodes=nodes)
    follow_launcher(trainer)
    assert (trainer.devices, trainer.num_nodes) == found
