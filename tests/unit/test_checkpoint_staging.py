"""Host memory for saves in the background, made ahead, and what the writing does with memory."""

import zlib

import numpy as np
import pytest
import torch

from lit_gpt_dist.checkpoint import durable as files
from lit_gpt_dist.checkpoint import find
from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.dcp import Writer
from lit_gpt_dist.checkpoint.durable import ChecksummedFile
from lit_gpt_dist.checkpoint.saver import Job, Saver, load_into
from lit_gpt_dist.checkpoint.tensors import Stager


def tensors(count=50):
    return {f"model.{i}": torch.full((i + 1, 3), float(i)) for i in range(count)}


@pytest.fixture
def stager():
    stager = Stager()
    yield stager
    stager.close()


def addresses(tensors):
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_staging_uses_the_buffers_made_ahead(stager):
    sources = tensors()
    stager.prepare(sources)
    stager._preparing.join()
    made = addresses(stager.buffers)
    staged = stager.stage(sources)
    assert addresses(staged) == made
    assert all(torch.equal(staged[name], sources[name]) for name in sources)
    assert not set(made.values()) & set(addresses(sources).values())


def test_a_save_before_the_buffers_are_made_waits_for_them_and_keeps_each_once(stager):
    sources = tensors(500)
    stager.prepare(sources)
    staged = stager.stage(sources)
    assert not stager._preparing.is_alive()
    assert addresses(stager.buffers) == addresses(staged)
    assert all(torch.equal(staged[name], sources[name]) for name in sources)
    assert addresses(stager.stage(sources)) == addresses(staged)


def test_preparing_after_a_save_makes_nothing_anew(stager):
    sources = tensors()
    before = addresses(stager.stage(sources))
    stager.prepare(sources)
    assert addresses(stager.stage(sources)) == before


def test_what_is_saved_may_differ_from_what_was_prepared(stager):
    stager.prepare({"model.0": torch.ones(2), "model.1": torch.ones(2), "model.gone": torch.ones(2)})
    sources = {"model.0": torch.ones(3), "model.1": torch.ones(2).double(), "model.new": torch.ones(1)}
    staged = stager.stage(sources)
    assert set(staged) == set(stager.buffers) == set(sources)
    assert all(torch.equal(staged[name], sources[name]) for name in sources)


def test_memory_that_cannot_be_made_ahead_is_asked_for_again_when_saving(stager):
    impossible = torch.empty(1 << 60, device="meta")
    stager.prepare({"model.0": impossible, "model.1": torch.ones(2)})
    assert torch.equal(stager.stage({"model.1": torch.ones(2)})["model.1"], torch.ones(2))
    with pytest.raises(RuntimeError):
        stager.stage({"model.0": impossible})


def test_closing_a_saver_ends_its_preparing():
    saver = Saver()
    saver.prepare(tensors(2000))
    saver.close()
    assert not saver.stager._preparing.is_alive()


class Pieces:
    """A file that only remembers what it was given."""

    def __init__(self):
        self.given = []

    def write(self, piece):
        self.given.append(np.frombuffer(piece, dtype=np.uint8))


def test_large_tensors_reach_the_file_in_pieces_of_their_own_memory():
    data = torch.arange(2 * files.PIECE_BYTES + 12, dtype=torch.int64).to(torch.uint8).numpy()
    pieces = Pieces()
    stream = ChecksummedFile(pieces)
    assert stream.write(data) == data.nbytes == stream.size == stream.tell()
    assert [len(piece) for piece in pieces.given] == [files.PIECE_BYTES, files.PIECE_BYTES, 12]
    assert all(np.shares_memory(piece, data) for piece in pieces.given)
    assert stream.crc == zlib.crc32(data)


def test_pages_given_to_the_disk_early_change_nothing_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", 1000)
    monkeypatch.setattr(files, "BEHIND_BYTES", 3000)
    hints = []
    forget = files.forget_cached
    monkeypatch.setattr(files, "forget_cached", lambda *range_: (hints.append(range_[1:]), forget(*range_)))
    data = np.random.default_rng(0).bytes(10_000)
    file_system = files.DurableFileSystem()
    with file_system.create_stream(tmp_path / "part", "wb") as stream:
        for start in range(0, len(data), 2500):
            stream.write(data[start : start + 2500])
    assert (tmp_path / "part").read_bytes() == data
    assert file_system.written["part"] == {"bytes": len(data), "crc32": zlib.crc32(data)}
    # every range twice: first to be written, later to be forgotten; and all of it after the sync
    assert hints == [(0, 3500), (0, 7000), (3500, 6500), ()]


@pytest.mark.parametrize("background", [True, False])
def test_a_save_in_the_background_holds_the_same_as_one_at_once(tmp_path, background):
    sources = tensors(9)
    saver = Saver()
    saver.prepare(sources)
    job = Job(tmp_path / layout.FOLDER / layout.step_name(1), 1, "a" * 32, "{}", sources)
    saver.save(job, background)
    expected = {name: tensor.clone() for name, tensor in sources.items()}
    for tensor in sources.values():
        tensor.zero_()  # training goes on
    saver.wait()
    read = {name: torch.full_like(tensor, -1) for name, tensor in sources.items()}
    load_into(read, job.path, saver.ranks)
    saver.close()
    assert all(torch.equal(read[name], expected[name]) for name in expected)
    assert find.newest_good(tmp_path)[0] == job.path


def test_nothing_is_copied_ahead_on_the_device_of_what_is_in_host_memory(tmp_path):
    assert Writer(tmp_path, on_host=True).per_thread_copy_ahead == 0
    assert Writer(tmp_path).per_thread_copy_ahead > 0
