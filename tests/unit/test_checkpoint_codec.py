import enum
import json
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np
import pytest
import torch

from lit_gpt_dist.checkpoint.codec import NotStorableError, decode, encode, tensor_names
from lit_gpt_dist.model.config import GPTConfig


class Mode(enum.Enum):
    FAST = "fast"


@dataclass
class Options:
    mode: Mode
    path: Path
    sizes: tuple[int, ...]


def round_trip(value):
    tensors = {}
    text = json.dumps(encode(value, tensors))
    return decode(json.loads(text), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1 + 0.2,
        float("inf"),
        "text",
        [1, [2, 3]],
        (1, (2, "x")),
        {"a": {"b": (1,)}},
        {1: "one", 2: "two"},
        {"!": "not a mark"},
        {1, 2},
        PurePath("a/b"),
    ],
)
def test_values_come_back_equal_and_of_the_same_type(value):
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value) or isinstance(value, PurePath)


def test_dataclasses_enumerations_and_paths_become_plain_values():
    back = round_trip({"options": Options(Mode.FAST, Path("corpus"), (1, 2)), "config": GPTConfig()})
    assert back["options"] == {"mode": "fast", "path": PurePath("corpus"), "sizes": (1, 2)}
    assert back["config"] == GPTConfig().to_dict()


def test_tensors_are_put_aside_under_the_place_where_they_stood():
    tensors = {}
    document = encode({"a": [torch.arange(3)], "n": np.float32(0.5), "array": np.ones(2)}, tensors, "state")
    assert sorted(tensors) == ["state.a.0", "state.array"] == sorted(tensor_names(document))
    assert document["n"] == 0.5
    assert decode(document, tensors)["a"][0].tolist() == [0, 1, 2]


def test_anything_else_is_refused_by_name():
    with pytest.raises(NotStorableError, match=r"state\.callback\.hook holds a builtins\.function"):
        encode({"callback": {"hook": lambda: None}}, {}, "state")


def test_a_document_that_was_not_written_here_is_refused():
    with pytest.raises(ValueError, match="unreadable value"):
        decode({"!": "call", "value": "os.system"}, {})
