import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from lit_gpt_dist.data import sources
from lit_gpt_dist.data.corpus import load_corpus
from lit_gpt_dist.data.sources import find_text, read_pieces
from lit_gpt_dist.data.stream import TokenStream, open_shard
from lit_gpt_dist.data.tokenizers import CharVocabulary
from lit_gpt_dist.errors import UserError


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def text_of(corpus) -> str:
    return corpus.vocabulary.decode(corpus.tokens.to_numpy())


def test_a_file_becomes_characters(tmp_path):
    corpus = load_corpus(write(tmp_path / "a.any", "hello мир"))
    assert text_of(corpus) == "hello мир"
    assert (corpus.vocabulary.kind, corpus.vocabulary.size, len(corpus)) == ("char", 8, 9)
    assert corpus.tokens.dtype == np.uint8


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path):
    write(tmp_path / "b.txt", "B")
    write(tmp_path / "a" / "x.md", "A")
    write(tmp_path / "c.bin", b"\xff")
    write(tmp_path / ".hidden" / "h.txt", "H")
    write(tmp_path / ".h.txt", "H")
    corpus = load_corpus(str(tmp_path))
    assert text_of(corpus) == "A\nB"
    assert corpus.skipped == 3


def test_a_glob_takes_files_of_any_name(tmp_path):
    write(tmp_path / "a" / "x.log", "X")
    write(tmp_path / "y.log", "Y")
    write(tmp_path / "z.txt", "Z")
    assert text_of(load_corpus(f"{tmp_path}/**/*.log")) == "X\nY"


def test_the_default_corpus_is_the_standard_library_and_the_same_every_time():
    corpus = load_corpus(None)
    assert len(corpus) > 2_000_000
    assert corpus.vocabulary.kind == "byte"
    assert corpus.digest == load_corpus(None).digest
    files = find_text(None).files
    assert not [f for f in files if "site-packages" in f.parts or "test" in f.parts]
    assert list(files) == sorted(files, key=lambda f: f.as_posix())


def test_pieces_join_to_the_text_whatever_their_size(tmp_path, monkeypatch):
    text = "".join(f"линия {i}\n" for i in range(500)) + "no line break" * 50 + "\n🙂"
    path = Path(write(tmp_path / "t.txt", text))
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 64)
    monkeypatch.setattr(sources, "_READ_BYTES", 7)  # characters torn apart by the reader's buffer
    pieces = list(read_pieces([path, path]))
    assert "".join(pieces) == text + "\n" + text
    assert len(pieces) > 50


@pytest.mark.parametrize("content", ["", b""])
def test_an_empty_corpus_is_refused(tmp_path, content):
    with pytest.raises(UserError, match="is empty; give"):
        load_corpus(write(tmp_path / "empty.txt", content))


def test_a_file_that_is_not_utf8_is_named_with_the_byte(tmp_path, monkeypatch):
    path = write(tmp_path / "latin.txt", "abc мир ".encode() + b"\xe9 more text")
    for read_bytes in (1 << 22, 3):
        monkeypatch.setattr(sources, "_READ_BYTES", read_bytes)
        with pytest.raises(UserError, match=r"latin\.txt is not UTF-8: byte 11 is 0xe9; convert"):
            load_corpus(path)


def test_a_character_cut_off_at_the_end_is_not_utf8(tmp_path):
    with pytest.raises(UserError, match="byte 2 is 0xd0"):
        load_corpus(write(tmp_path / "cut.txt", b"ab\xd0"))


@pytest.mark.parametrize("path", ["/nowhere/x.txt", "/nowhere/*.txt"])
def test_a_path_that_does_not_exist_is_refused(path):
    with pytest.raises(UserError, match="does not exist; give"):
        load_corpus(path)


def test_a_folder_without_text_is_refused(tmp_path):
    write(tmp_path / "a.bin", b"\x00")
    with pytest.raises(UserError, match="holds no text files"):
        load_corpus(str(tmp_path))


@pytest.mark.parametrize("path", ["", " "])
def test_a_path_of_nothing_is_not_the_folder_one_stands_in(path):
    with pytest.raises(UserError, match="names nothing"):
        load_corpus(path)


def test_a_folder_without_permission_is_told_in_a_line(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "abc")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match="cannot be read"):
        load_corpus(str(tmp_path))


def test_the_vocabulary_of_weights_is_the_usual_one_of_a_text_and_a_prepared_folders_can_be_named(tmp_path):
    path = write(tmp_path / "a.txt", "abc")
    wide = CharVocabulary("abcdef")
    assert load_corpus(path, usual=wide).vocabulary == wide
    assert load_corpus(path, "char", usual=wide).vocabulary.size == 3, "what is asked for goes first"
    write(tmp_path / "prepared" / "vocabulary.json", wide.to_json())
    assert load_corpus(path, str(tmp_path / "prepared")).vocabulary == wide
    with pytest.raises(UserError, match="character 'z'"):
        load_corpus(write(tmp_path / "z.txt", "abz"), usual=wide)


def test_an_untrained_bpe_is_refused_with_the_command_that_trains_it(tmp_path):
    with pytest.raises(UserError, match="lit-gpt-dist prepare"):
        load_corpus(write(tmp_path / "a.txt", "abc"), "bpe")


def test_the_validation_part_is_cut_off_the_end(tmp_path):
    corpus = load_corpus(write(tmp_path / "a.txt", "x" * 90 + "y" * 10))
    train, validation = corpus.split(0.1, 4)
    assert (len(train), len(validation)) == (90, 10)
    assert corpus.vocabulary.decode(validation.to_numpy()) == "y" * 10
    assert len(corpus.split(0.0, 4)[1]) == 0


def test_the_validation_part_has_at_least_one_window_and_is_capped(tmp_path, monkeypatch):
    corpus = load_corpus(write(tmp_path / "a.txt", "x" * 1000))
    assert len(corpus.split(0.001, 64)[1]) == 65
    monkeypatch.setattr("lit_gpt_dist.data.corpus.MAX_VALIDATION_TOKENS", 100)
    assert len(corpus.split(0.5, 64)[1]) == 100


@pytest.mark.parametrize(("length", "fraction"), [(9, 0.1), (4, 0.0), (100, 0.97)])
def test_a_corpus_too_short_for_the_context_is_refused(tmp_path, length, fraction):
    corpus = load_corpus(write(tmp_path / "a.txt", "x" * length))
    with pytest.raises(UserError, match="give a longer text or a smaller"):
        corpus.split(fraction, 4)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2])
def test_a_validation_share_that_is_none_is_refused(tmp_path, fraction):
    with pytest.raises(UserError, match="val_fraction"):
        load_corpus(write(tmp_path / "a.txt", "x" * 100)).split(fraction, 4)


@pytest.mark.parametrize("borders", [[], [1, 1, 40, 43]])
def test_shards_are_one_stream_across_their_borders(borders):
    whole = np.arange(100, dtype=np.uint16)
    stream = TokenStream(np.split(whole, borders))
    starts = np.arange(0, 100 - 20 + 1)
    assert np.array_equal(stream.gather(starts, 20), whole[starts[:, None] + np.arange(20)])
    part = stream.view(30, 70)
    assert np.array_equal(part.to_numpy(), whole[30:70])
    assert np.array_equal(part.view(5, 20).gather(np.array([[0], [5]]), 10)[1, 0], whole[40:50])
    assert part.gather(np.array([3]), 7).tolist() == [list(range(33, 40))], "of another length than before"


@pytest.mark.parametrize("start", [-1, 91])
def test_a_window_outside_the_stretch_is_an_error(start):
    stream = TokenStream([np.arange(200, dtype=np.uint16)]).view(50, 150)
    with pytest.raises(IndexError):
        stream.gather(np.array([start]), 10)


def test_a_memory_mapped_shard_travels_to_other_processes_by_name(tmp_path):
    np.arange(100_000, dtype="<u2").tofile(tmp_path / "s.bin")
    stream = TokenStream([open_shard(tmp_path / "s.bin", "<u2", 100_000)]).view(10, 99_000)
    document = pickle.dumps(stream)
    assert len(document) < 1000
    restored = pickle.loads(document)
    assert restored.memory_mapped
    assert np.array_equal(restored.to_numpy(), stream.to_numpy())
