"""Whether a checkpoint fits the run that wants it, before anything is changed. Compares; loads nothing.

What a run is, in a checkpoint's ``state.json``: ``model`` (the GPT's configuration), ``vocabulary`` (its digest, size, kind
and whole JSON document), ``corpus`` (its digest), ``run`` (the configuration as YAML text) and ``tag`` (the one given, or
null). Each is taken from where it is: the GPT, the data module, the callback that saves the configuration; what is not there
is left out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_gpt_dist.checkpoint import find
from lit_gpt_dist.checkpoint.tensors import MODEL, OTHER, module_tensors
from lit_gpt_dist.errors import UserError

SHOWN = 3  # names in a message


def facts_of(trainer: pl.Trainer) -> dict[str, Any]:
    """What this run is, as JSON values."""
    data: Any = getattr(trainer, "datamodule", None)
    facts: dict[str, Any] = {}
    describe = getattr(getattr(getattr(trainer.lightning_module, "model", None), "config", None), "to_dict", None)
    if describe is not None:
        facts["model"] = describe()
    vocabulary = getattr(data, "vocabulary", None)
    if vocabulary is not None:
        facts["vocabulary"] = {
            "kind": vocabulary.kind,
            "size": vocabulary.size,
            "digest": vocabulary.digest,
            "document": vocabulary.to_json(),  # text: its tokens may be anything, "!" too
        }
    corpus = getattr(data, "corpus", None)
    if corpus is not None:
        facts["corpus"] = {"digest": corpus.digest, "name": str(corpus.name)}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if hasattr(callback, "parser") and hasattr(callback, "config"):
            facts["run"] = callback.parser.dump(callback.config, skip_none=False)
            facts |= {"tag": callback.config.tag} if "tag" in callback.config else {}
    return facts


def sieves_of(trainer: pl.Trainer) -> find.Sieves:
    """What ``last`` passes over: checkpoints of another tag than this run's, where it has one, and of another model."""
    facts = facts_of(trainer)
    tag = {"another tag": find.of_tag(facts["tag"])} if facts.get("tag") else {}
    mine = _what_weights_mean(facts)
    return tag | {"another model or vocabulary": lambda document: not document or _what_weights_mean(document) == mine}


def _what_weights_mean(facts: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    shape = {name: value for name, value in facts.get("model", {}).items() if name != "dropout"}
    return shape, facts.get("vocabulary", {}).get("digest")


def check(
    document: dict[str, Any], stored: Mapping[str, Any], trainer: pl.Trainer, folder: Path, fitting: bool
) -> None:
    """Raises UserError where the checkpoint is of another model or vocabulary, or cannot be gone on from."""
    _check_kind(document, stored, folder, fitting)
    _check_vocabulary(document.get("vocabulary"), facts_of(trainer).get("vocabulary"), folder)
    _check_shapes(stored, trainer.lightning_module, folder)


def _check_kind(document: dict[str, Any], stored: Mapping[str, Any], folder: Path, fitting: bool) -> None:
    if not isinstance(document.get("lightning"), dict) or not isinstance(document.get("run_id"), str):
        raise UserError(f"checkpoint {folder} cannot be used: its state.json is not one of this program")
    if fitting and document.get("weights_only", False):
        raise UserError(
            f"checkpoint {folder} holds weights only, so training cannot go on from it; "
            "start from its weights with --model.init_from"
        )


def _check_vocabulary(saved: Any, current: Any, folder: Path) -> None:
    if not saved or not current or saved.get("digest") == current.get("digest"):
        return
    raise UserError(
        f"the vocabulary of checkpoint {folder} ({_vocabulary_text(saved)}) is not this run's "
        f"({_vocabulary_text(current)}); give --data.corpus and --data.tokenizer of the run that wrote it"
    )


def _vocabulary_text(facts: dict[str, Any]) -> str:
    return f"{facts.get('kind', 'unknown')}, {facts.get('size', '?')} tokens, digest {str(facts.get('digest'))[:12]}"


def _check_shapes(stored: Mapping[str, Any], module: Any, folder: Path) -> None:
    weights, _ = module_tensors(module)
    for name, weight in weights.items():
        if name in stored and tuple(stored[name].size) != tuple(weight.shape):
            raise UserError(
                f"{name} is {shape_text(stored[name].size)} in checkpoint {folder}, but {shape_text(weight.shape)} in this "
                "model; give the model's size, context and vocabulary as in the run that wrote it"
            )
    missing = [name for name in weights if name not in stored]
    extra = [name for name in stored if name.startswith((MODEL, OTHER)) and name not in weights]
    if missing or extra:
        raise UserError(
            f"checkpoint {folder} is of another model: it lacks {some(missing)} and has {some(extra)} besides; "
            "give the model options of the run that wrote it"
        )


def shape_text(size: Any) -> str:
    return "×".join(map(str, size)) or "one number"


def some(names: list[str]) -> str:
    """A few of the names, and how many more."""
    if not names:
        return "nothing"
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
