"""A new run's weights from an old one's (``--model.init_from``). Each rank reads a tensor at a time and keeps its part.

Knows nothing of optimizer state or steps: those are a resume's.
"""

import torch

from lit_gpt_dist.checkpoint.weights import open_weights
from lit_gpt_dist.data.tokenizers import Vocabulary, vocabulary_from_json
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.parallel.fsdp2 import assign_shard


def start_from(model: GPT, path: str, vocabulary: Vocabulary) -> None:
    """Gives every parameter of the placed ``model`` its value in what lies at ``path``.

    Raises:
        UserError: it has another shape, or other tokens than ``vocabulary``.
    """
    config, document, tensors = open_weights(path)
    if document is not None and vocabulary_from_json(document).digest != vocabulary.digest:
        raise UserError(
            f"init_from {path} was trained on another vocabulary than the corpus has; give its --data.tokenizer, or the "
            "prepared folder it was trained on"
        )
    differing = [
        f"{name} {theirs}"
        for name, theirs in config.to_dict().items()
        if name != "dropout" and theirs != getattr(model.config, name)
    ]
    if differing:
        raise UserError(
            f"init_from {path} is a model of another shape; give {', '.join(differing)}, as --model.NAME VALUE"
        )
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in tensors:
            if name in parameters:  # a tied head is the embedding under another name
                assign_shard(parameters[name], value)
