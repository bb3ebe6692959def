import numpy as np
import pytest
import torch

from lit_gpt_dist.data import placement
from lit_gpt_dist.data.corpus import Corpus
from lit_gpt_dist.data.placement import Placement, cut
from lit_gpt_dist.data.provenance import changes_since
from lit_gpt_dist.data.stream import TokenStream
from lit_gpt_dist.data.tokenizers import ByteVocabulary

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)  # only looked at: nothing is put on a card here
CORPUS = Corpus(TokenStream([np.arange(200, dtype=np.uint8)]), ByteVocabulary(), "d", "name")


def placed(device, on_device=None, workers=None):
    found = Placement(cut(CORPUS, 0.1, None, 8), device, on_device, workers)
    return found.on_device, found.workers, found.reads_ahead


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((CARD,), (True, 0, False)),  # small: a copy on the device
        ((CARD, False), (False, 2, True)),
        ((CARD, None, 3), (False, 3, True)),  # workers have nothing to read for a copy
        ((CARD, False, 0), (False, 0, True)),  # read by the process itself, and still pinned
        ((CPU,), (False, 0, True)),
        ((CPU, True), (False, 0, True)),  # a CPU needs no copy
        ((CPU, None, 2), (False, 2, True)),
    ],
)
def test_where_windows_are_gathered_follows_from_device_size_and_options(given, expected):
    assert placed(*given) == expected


def test_a_corpus_beyond_the_limit_stays_on_the_host(monkeypatch):
    monkeypatch.setattr(placement, "DEVICE_BYTES", 199)
    assert placed(CARD) == (False, 2, True)
    assert placed(CARD, True) == (True, 0, False)  # unless asked for


def test_a_checkpoint_that_says_nothing_of_its_data_is_not_compared():
    assert changes_since({}, {"vocabulary": "a"}, "name") == []
