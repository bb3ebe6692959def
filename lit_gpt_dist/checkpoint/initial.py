"""Weights to start from instead of random ones: their shape decides the model's. Nothing else of a run is taken over."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_gpt_dist.checkpoint.sources import open_source, open_weights
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import PRESETS, GPTConfig, preset

FREE = ("dropout",)  # what training may choose without changing a weight's meaning


def shape_of_weights(path: str, size: str | None, overrides: dict[str, Any]) -> tuple[GPTConfig, str | None]:
    """The configuration of the weights at ``path``, with the dropout asked for, and their vocabulary (JSON) if they carry one.

    Raises:
        UserError: a size or shape was given too, and it is another one.
    """
    source = open_source(path)
    found = source.config.to_dict()
    given = {name: value for name, value in overrides.items() if value is not None and name not in FREE}
    if size is not None:
        named = preset(size).to_dict()
        given = {name: named[name] for name in PRESETS.get(size, {})} | given
    for name, value in given.items():
        if found[name] != value:
            raise UserError(
                f"{name} is {value}, but {found[name]} in {path}; leave --model.{name} and --model.size out"
            )
    return GPTConfig(**{**found, "dropout": overrides.get("dropout") or 0.0}), source.vocabulary  # type: ignore[arg-type]


def load_weights(model: nn.Module, path: str, vocabulary: Any, assign: Callable[[Tensor, Tensor], None]) -> None:
    """Fills ``model``, already placed on its devices, from ``path``, a tensor at a time.

    Args:
        vocabulary: the corpus's; its tokens must mean what they meant to the weights.
        assign: how a full CPU value gets into a parameter, or this rank's part of it.

    Raises:
        UserError: another vocabulary.
    """
    config, document, tensors = open_weights(path)
    if document is not None:
        check_vocabulary(path, document, vocabulary)
    else:
        rank_zero_warn(f"{path} carries no vocabulary: whether its tokens mean what the corpus's do cannot be checked")
    if vocabulary.size > config.vocab_size:
        raise UserError(
            f"the corpus has a vocabulary of {vocabulary.size}, but {path} has {config.vocab_size} rows; "
            "encode the corpus with the vocabulary of the weights (--data.tokenizer)"
        )
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in tensors:
            if name in parameters:  # a tied head is the embedding under another name
                assign(parameters[name], value)


def check_vocabulary(path: str, document: str, vocabulary: Any) -> None:
    from lit_gpt_dist.data.tokenizers import vocabulary_from_json

    own = vocabulary_from_json(document)
    if own.digest != vocabulary.digest:
        raise UserError(
            f"the vocabulary of {path} ({own.kind} of {own.size}) is not the corpus's ({vocabulary.kind} of "
            f"{vocabulary.size}); leave --data.tokenizer out, or prepare the corpus with the vocabulary of the weights"
        )
