import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lit_gpt_dist.data.corpus import load_corpus
from lit_gpt_dist.data.prepare import main
from lit_gpt_dist.errors import UserError

TEXT = "".join(f"Line {i}: the quick brown fox, съешь ещё булок № {i % 7}.\n" for i in range(400))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, "utf-8")
    return str(path)


def prepare(text, out, *more):
    assert main([text, "--out", str(out), *more]) == 0
    return load_corpus(str(out))


@pytest.mark.parametrize("tokenizer", ["char", "char:ru-en", "byte"])
def test_shards_hold_what_the_text_itself_gives(text, tmp_path, tokenizer, capsys):
    direct = load_corpus(text, tokenizer)
    corpus = prepare(text, tmp_path / "out", "--tokenizer", tokenizer, "--shard_tokens", "5000")
    assert corpus.tokens.memory_mapped
    assert corpus.vocabulary == direct.vocabulary
    assert np.array_equal(corpus.tokens.to_numpy(), direct.tokens.to_numpy())
    assert corpus.digest == direct.digest
    assert corpus.dropped == direct.dropped
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == f"next: lit-gpt-dist fit --data.corpus {tmp_path / 'out'}"
    if tokenizer == "char:ru-en":
        assert "dropped 400 characters of 1 kinds outside the allowed set, most often '№' × 400" in output


def test_a_trained_bpe_gives_the_text_back_and_can_be_used_again(text, tmp_path):
    corpus = prepare(text, tmp_path / "a", "--tokenizer", "bpe", "--vocab_size", "400", "--shard_tokens", "1000")
    assert corpus.vocabulary.size <= 400
    assert corpus.vocabulary.decode(corpus.tokens.to_numpy()) == TEXT
    again = prepare(text, tmp_path / "b", "--tokenizer", str(tmp_path / "a" / "vocabulary.json"))
    assert again.digest == corpus.digest
    assert load_corpus(text, str(tmp_path / "a" / "vocabulary.json")).digest == corpus.digest


def test_the_folder_says_what_is_in_it(text, tmp_path):
    prepare(text, tmp_path / "out", "--shard_tokens", "5000")
    facts = json.loads((tmp_path / "out" / "corpus.json").read_text())
    assert facts["version"] == 1
    assert facts["dtype"] == "<u2"
    assert facts["tokens"] == len(TEXT) == sum(shard["tokens"] for shard in facts["shards"])
    assert [shard["tokens"] for shard in facts["shards"]][:-1] == [5000] * (len(TEXT) // 5000)
    assert facts["sources"] == [text]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "text.txt"]  # no leftovers beside it


def test_windows_cross_from_shard_to_shard(text, tmp_path):
    corpus = prepare(text, tmp_path / "out", "--shard_tokens", "5000")
    windows = corpus.gather(np.array([4990, 4999, 5000, 9998]), 20)
    assert [corpus.vocabulary.decode(w) for w in windows] == [TEXT[s : s + 20] for s in (4990, 4999, 5000, 9998)]


def test_several_inputs_are_joined_and_a_file_is_taken_once(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1], encoding="utf-8")
    assert main([text, str(other), str(tmp_path / "*.txt"), "--out", str(tmp_path / "out")]) == 0
    corpus = load_corpus(str(tmp_path / "out"))
    assert corpus.vocabulary.decode(corpus.tokens.to_numpy()) == TEXT + "\n" + TEXT[::-1]


def test_what_is_skipped_of_a_folder_is_told_with_how_many_which_and_why(text, tmp_path, capsys):
    folder = tmp_path / "texts"
    (folder / ".git").mkdir(parents=True)
    shutil.copy(text, folder)
    for name in ("a.bin", "b.log", "c", "d.dat", "e.raw", ".git/config", ".git/notes.txt"):
        (folder / name).write_text("more")
    (folder / "linked").symlink_to(tmp_path, target_is_directory=True)
    assert main([str(folder), str(folder / "e.raw"), "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    few = ", ".join(str(folder / name) for name in ("a.bin", "b.log", "c"))
    assert f"skipped 4 not named like text (*.txt, *.md, *.py, …): {few} and 1 more\n" in output
    assert f"skipped 1 hidden: {folder / '.git'}\n" in output
    assert f"skipped 1 linked to a folder: {folder / 'linked'}\n" in output
    corpus = load_corpus(str(tmp_path / "out"))
    assert corpus.vocabulary.decode(corpus.tokens.to_numpy()) == TEXT + "\nmore"
    prepare(text, tmp_path / "whole")
    assert "\nskipped" not in capsys.readouterr().out


def test_an_existing_folder_is_refused_and_left_alone(text, tmp_path):
    before = prepare(text, tmp_path / "out").digest
    with pytest.raises(UserError, match="exists already; give another --out, or --overwrite"):
        prepare(text, tmp_path / "out", "--tokenizer", "byte")
    assert load_corpus(str(tmp_path / "out")).digest == before


def test_overwriting_replaces_only_by_a_whole_corpus(text, tmp_path):
    before = prepare(text, tmp_path / "out").digest
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good until \xff")
    with pytest.raises(UserError, match="not UTF-8"):
        prepare(str(bad), tmp_path / "out", "--tokenizer", "byte", "--overwrite")
    assert load_corpus(str(tmp_path / "out")).digest == before
    assert prepare(text, tmp_path / "out", "--tokenizer", "byte", "--overwrite").vocabulary.kind == "byte"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.txt", "out", "text.txt"]


def test_overwriting_spares_what_is_no_prepared_corpus(text, tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="not a prepared corpus"):
        prepare(text, tmp_path / "mine", "--overwrite")


def test_an_input_inside_the_folder_to_replace_is_refused(text, tmp_path):
    prepare(text, tmp_path / "out")
    inside = shutil.copy(text, tmp_path / "out" / "kept.txt")
    with pytest.raises(UserError, match="lies inside"):
        prepare(str(inside), tmp_path / "out", "--overwrite")
    assert Path(inside).exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--vocab_size", "300"], "vocab_size 300 is for --tokenizer bpe"),
        (["--tokenizer", "bpe", "--vocab_size", "0"], "cannot hold the 256 bytes"),
        (["--tokenizer", "nope"], "neither a known name nor a file"),
        (["--shard_tokens", "0"], "shard_tokens 0"),
    ],
)
def test_options_that_cannot_be_leave_nothing_behind(text, tmp_path, more, words):
    with pytest.raises(UserError, match=words):
        prepare(text, tmp_path / "new" / "out", *more)
    assert not list((tmp_path / "new").glob("*"))


def test_a_text_without_tokens_is_refused(tmp_path):
    (tmp_path / "odd.txt").write_text("№№№", "utf-8")
    with pytest.raises(UserError, match="give no tokens"):
        prepare(str(tmp_path / "odd.txt"), tmp_path / "out", "--tokenizer", "char:ru-en")
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_refused(text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        prepare(text, tmp_path / "file" / "out")


def test_prepared_shards_are_not_text(text, tmp_path):
    prepare(text, tmp_path / "out")
    with pytest.raises(UserError, match="is a prepared corpus, not text"):
        prepare(str(tmp_path / "out"), tmp_path / "again")


def damage_shard(folder):
    with (folder / "tokens-00000.bin").open("ab") as file:
        file.truncate(100)


def damage_vocabulary(folder):
    (folder / "vocabulary.json").write_text('{"kind": "byte"}')


def damage_facts(folder):
    (folder / "corpus.json").write_text('{"version": 1')


def later_version(folder):
    facts = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps({**facts, "version": 99}))


@pytest.mark.parametrize("damage", [damage_shard, damage_vocabulary, damage_facts, later_version])
def test_a_damaged_corpus_is_refused_when_it_is_loaded(text, tmp_path, damage):
    prepare(text, tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(UserError, match="prepare"):
        load_corpus(str(tmp_path / "out"))


def test_a_tokenizer_other_than_the_shards_own_is_refused(text, tmp_path):
    prepare(text, tmp_path / "out")
    assert load_corpus(str(tmp_path / "out"), "char").vocabulary.kind == "char"
    with pytest.raises(UserError, match="was prepared with a char vocabulary"):
        load_corpus(str(tmp_path / "out"), "byte")
