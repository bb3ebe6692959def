import json
import pickle

import numpy as np
import pytest

from lit_gpt_dist.data.tokenizers import (
    PRESET_CHARACTERS,
    ByteVocabulary,
    CharVocabulary,
    StreamDecoder,
    fixed_vocabulary,
    train_bpe,
    vocabulary_from_json,
)
from lit_gpt_dist.errors import UserError

TEXT = "Hé, мир! 🙂 — «ok» \r\n\tx\ufffdy"
RU_EN = "ru-en"


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(["the cat sat on the mat, the hat and the bat. мир миру мир.\n" * 50], 300)


@pytest.fixture(params=["char", "byte", "bpe"])
def vocabulary(request, bpe):
    return {"char": CharVocabulary(TEXT), "byte": ByteVocabulary(), "bpe": bpe}[request.param]


def test_text_goes_there_and_back(vocabulary):
    tokens = vocabulary.encode(TEXT)
    assert tokens.dtype == vocabulary.dtype
    assert int(tokens.max()) < vocabulary.size
    assert vocabulary.decode(tokens) == TEXT


def test_the_document_restores_the_vocabulary(vocabulary):
    restored = vocabulary_from_json(vocabulary.to_json())
    assert restored == vocabulary
    assert np.array_equal(restored.encode(TEXT), vocabulary.encode(TEXT))
    assert pickle.loads(pickle.dumps(vocabulary)) == vocabulary


def test_streamed_tokens_give_the_same_text(vocabulary):
    decoder = StreamDecoder(vocabulary)
    pieces = [decoder.push(int(token)) for token in vocabulary.encode(TEXT)]
    assert "".join(pieces) + decoder.finish() == TEXT
    assert "🙂" in pieces or any("🙂" in piece for piece in pieces)  # whole when it appears


def test_a_cut_off_character_ends_as_the_replacement_character(bpe):
    for vocabulary in (ByteVocabulary(), bpe):
        decoder = StreamDecoder(vocabulary)
        shown = "".join(decoder.push(int(t)) for t in vocabulary.encode("a🙂")[:-1])
        assert shown == "a"
        assert decoder.finish() == "\ufffd"


def test_numbers_that_are_no_utf8_do_not_hold_the_stream_back(bpe):
    decoder = StreamDecoder(bpe)
    continuation = int(bpe.encode("🙂")[-1])
    assert "".join(decoder.push(continuation) for _ in range(20)) != ""


def test_characters_are_numbered_by_code_point():
    vocabulary = CharVocabulary("banana")
    assert vocabulary.characters == "abn"
    assert vocabulary.encode("nab").tolist() == [2, 0, 1]
    assert vocabulary.dtype == np.uint8


def test_more_than_256_characters_take_16_bits():
    vocabulary = CharVocabulary(map(chr, range(1000, 1300)))
    assert vocabulary.encode(chr(1299)).dtype == np.uint16
    assert vocabulary.encode(chr(1299)).tolist() == [299]


@pytest.mark.parametrize("odd", ["z", "\x00", "🙂", "\udcff"])
def test_a_character_outside_the_vocabulary_is_named_with_its_place_and_a_remedy(odd):
    with pytest.raises(UserError, match="position 2") as error:
        CharVocabulary("abc").encode("ab" + odd)
    assert repr(odd) in str(error.value)
    assert "remove it" in str(error.value)


def test_the_russian_and_english_set_is_exactly_as_specified():
    russian = "абвгдеёжзийклмнопрстуфхцчшщъыьэюя"
    english = "abcdefghijklmnopqrstuvwxyz"
    expected = set(russian + russian.upper() + english + english.upper() + "0123456789" + " \n" + ".,:;!?-—«»()")
    assert set(PRESET_CHARACTERS[RU_EN]) == expected
    assert len(PRESET_CHARACTERS[RU_EN]) == len(expected) == 142
    assert fixed_vocabulary("char:ru-en").size == 142


def test_characters_outside_an_allowed_set_are_dropped_and_counted():
    vocabulary = fixed_vocabulary("char:ru-en")
    tokens, dropped = vocabulary.encode_known("Ёж's № 5 — «да»'")
    assert vocabulary.decode(tokens) == "Ёжs  5 — «да»"
    assert dropped == {"'": 2, "№": 1}


def test_the_digest_tells_vocabularies_apart(bpe):
    vocabularies = [CharVocabulary("ab"), CharVocabulary("abc"), ByteVocabulary(), bpe]
    assert len({v.digest for v in vocabularies}) == 4
    assert CharVocabulary("ba").digest == CharVocabulary("ab").digest


def test_a_tokenizer_file_is_a_vocabulary(tmp_path, bpe):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(bpe.to_dict()["tokenizer"]), "utf-8")
    assert fixed_vocabulary(str(path)) == bpe
    path.write_text(bpe.to_json(), "utf-8")  # the document of this project
    assert fixed_vocabulary(str(path)) == bpe


def test_a_bpe_never_pads_or_truncates(bpe):
    document = bpe.to_dict()["tokenizer"]
    document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    restored = vocabulary_from_json(json.dumps({"kind": "bpe", "tokenizer": document}))
    assert restored.decode(restored.encode(TEXT)) == TEXT


@pytest.mark.parametrize("name", ["chars", "char:fr", "/nowhere/tokenizer.json"])
def test_an_unknown_tokenizer_is_refused_with_what_there_is(name):
    with pytest.raises(UserError, match="use "):
        fixed_vocabulary(name)


@pytest.mark.parametrize("content", ["not json", "[1]", '{"a": 1}', '{"kind": "later"}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(UserError):
        fixed_vocabulary(str(path))


def test_a_bpe_too_small_for_the_bytes_is_refused():
    with pytest.raises(UserError, match="256 bytes"):
        train_bpe(["text"], 100)
