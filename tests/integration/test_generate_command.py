"""``generate`` as a command, on what ``fit`` left."""

from pathlib import Path

import pytest
from helpers.commands import SMALL, here

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    ended = here(
        "fit", *SMALL, "--data.corpus", str(text), "--tag", "run", "--trainer.default_root_dir", str(root),
        "--optim.lr", "3e-3", "--trainer.max_steps", "30",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    return root


def generated(weights: Path, *options: str) -> str:
    ended = here("generate", str(weights), "--device", "cpu", "--tokens", "60", *options)
    assert ended.code == 0, ended.text
    return ended.out


def test_text_follows_the_prompt_and_the_seed_decides_it(trained: Path) -> None:
    weights = trained / "run" / "weights.safetensors"
    first = generated(weights, "--prompt", "License", "--seed", "1")
    assert first.startswith("License")
    assert len(first) == len("License") + 60 + 1
    assert generated(weights, "--prompt", "License", "--seed", "1") == first
    assert generated(weights, "--prompt", "License", "--seed", "2") != first


def test_checkpoint_folder_and_export_generate_the_same_text(trained: Path) -> None:
    exported = generated(trained / "run" / "weights.safetensors", "--prompt", "The", "--temperature", "0")
    assert generated(trained, "--prompt", "The", "--temperature", "0") == exported
    assert generated(trained / "checkpoints" / "last", "--prompt", "The", "--temperature", "0") == exported


def test_top_k_of_one_is_the_likeliest_text_whatever_the_seed(trained: Path) -> None:
    likeliest = generated(trained, "--prompt", "The", "--temperature", "0")
    assert generated(trained, "--prompt", "The", "--top_k", "1", "--seed", "9") == likeliest
    assert generated(trained, "--prompt", "The", "--top_p", "0.0001", "--seed", "9") == likeliest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "Ж"], ["Ж", "vocabulary"]),
        (["--temperature", "-1"], ["temperature -1", "0, or between"]),
        (["--top_k", "0"], ["top_k 0", "at least 1"]),
        (["--top_p", "1.5"], ["top_p 1.5", "at most 1"]),
        (["--top_p", "0"], ["top_p 0", "above 0"]),
        (["--temperature", "nan"], ["temperature nan", "0, or between"]),
        (["--seed", "99999999999999999999999"], ["seed 9", "2^63"]),
        (["--device", "abacus"], ["device abacus", "cpu"]),
        (["--device", "cuda:77"], ["device cuda:77", "cpu"]),
    ],
)
def test_what_cannot_be_generated_is_one_line(trained: Path, options: list[str], words: list[str]) -> None:
    ended = here("generate", str(trained), "--device", "cpu", *options)
    assert ended.code == 2, ended.text
    assert len(ended.err.strip().splitlines()) == 1
    assert all(word in ended.err for word in words), ended.err
