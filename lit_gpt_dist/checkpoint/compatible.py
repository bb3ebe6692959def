"""Whether a checkpoint fits the run that wants it, before anything is changed. Compares; loads nothing.

A LightningModule tells about its run through ``checkpoint_facts() -> dict`` (optional):

    model       the GPT's configuration
    vocabulary  {"digest", "size", "kind", "document"}: the JSON document and what identifies it; None if there is none
    corpus      {"digest", …}
    batch       {"global_batch", "micro_batch", "accumulate", "ranks"}
    run         the run's configuration, as it was given
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_gpt_dist.checkpoint.tensors import MODEL, OTHER, module_tensors
from lit_gpt_dist.errors import UserError

SHOWN = 3  # names in a message


def facts_of(module: Any) -> dict[str, Any]:
    """What the module tells about its run; a module that tells nothing has only what its GPT shows."""
    tell = getattr(module, "checkpoint_facts", None)
    if tell is not None:
        return tell()
    describe = getattr(getattr(getattr(module, "model", None), "config", None), "to_dict", None)
    return {"model": describe()} if describe is not None else {}


def check(document: dict[str, Any], stored: Mapping[str, Any], module: Any, folder: Path, fitting: bool) -> None:
    """Raises UserError where the checkpoint is of another model or vocabulary; warns where the curve will change."""
    facts = facts_of(module)
    _check_kind(document, stored, folder, fitting)
    _check_vocabulary(document.get("vocabulary"), facts.get("vocabulary"), folder)
    _check_shapes(stored, module, folder)
    if fitting:
        _warn_of_batch(document.get("batch"), facts.get("batch"))
        _warn_of_corpus(document.get("corpus"), facts.get("corpus"))


def _check_kind(document: dict[str, Any], stored: Mapping[str, Any], folder: Path, fitting: bool) -> None:
    if not isinstance(document.get("lightning"), dict) or not isinstance(document.get("run_id"), str):
        raise UserError(f"checkpoint {folder} cannot be used: its state.json is not one of this program")
    strange = [name for name, kept in stored.items() if not hasattr(kept, "size")]
    if strange:
        raise UserError(f"checkpoint {folder} is refused: {strange[0]} is not a tensor")
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
                f"{name} is {_shape(stored[name].size)} in checkpoint {folder}, but {_shape(weight.shape)} in this model; "
                "give the model's size, context and vocabulary as in the run that wrote it"
            )
    missing = [name for name in weights if name not in stored]
    extra = [name for name in stored if name.startswith((MODEL, OTHER)) and name not in weights]
    if missing or extra:
        raise UserError(
            f"checkpoint {folder} is of another model: it lacks {_some(missing)} and has {_some(extra)} besides; "
            "give the model options of the run that wrote it"
        )


def _shape(size: Any) -> str:
    return "×".join(map(str, size))


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _warn_of_batch(saved: Any, current: Any) -> None:
    if not saved or not current or saved.get("global_batch") == current.get("global_batch"):
        return
    rank_zero_warn(
        f"the global batch was {saved.get('global_batch')} windows and is {current.get('global_batch')} now: from here on a "
        "step sees other windows and another number of tokens, so the curve is no longer that of the run that wrote the "
        "checkpoint; learning rate and schedule stay as they were"
    )


def _warn_of_corpus(saved: Any, current: Any) -> None:
    if not saved or not current or saved.get("digest") == current.get("digest"):
        return
    rank_zero_warn(
        f"the corpus has changed (digest {str(saved.get('digest'))[:12]} then, {str(current.get('digest'))[:12]} now): "
        "the run goes on with other data"
    )
