"""Compares where a checkpoint's data came from with a run's own. Pure: takes two accounts, returns what differs."""

from typing import Any

from lit_gpt_dist.errors import UserError

_ANOTHER_ORDER = "the windows come in another order, and some may come again"
MEANINGS = {
    "corpus": "training continues on other text",
    "global_batch": "a step is not what it was: learning rate, schedule and step count mean something else",
    "context": "windows have another length",
    "draw": _ANOTHER_ORDER,
    "seed": _ANOTHER_ORDER,
}


def changes_since(saved: dict[str, Any], now: dict[str, Any], corpus: str) -> list[str]:
    """What a run that goes on from ``saved`` does otherwise, a line each. Both are a data module's ``state_dict``; an empty
    ``saved`` says nothing of its data.

    Raises:
        UserError: the tokens mean something else than those the weights were trained on.
    """
    if not saved:
        return []
    if saved["vocabulary"] != now["vocabulary"]:
        was, is_ = (f"{s['vocabulary_kind']} of {s['vocabulary_size']} ({s['vocabulary'][:12]})" for s in (saved, now))
        raise UserError(
            f"the checkpoint's vocabulary is {was}, but the corpus {corpus} has {is_}; use the corpus or"
            " the prepared folder it was trained on"
        )
    return [
        f"{name} was {saved.get(name)} in the checkpoint and is {now[name]} now: {meaning}."
        for name, meaning in MEANINGS.items()
        if saved.get(name) != now[name]
    ]
