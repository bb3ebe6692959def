"""``lit-gpt-dist generate``: text from a checkpoint or an export, token by token, on one device."""

import argparse
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from lit_gpt_dist.arguments import ToolParser
from lit_gpt_dist.checkpoint import open_weights
from lit_gpt_dist.data.tokenizers import StreamDecoder, Vocabulary, vocabulary_from_json
from lit_gpt_dist.errors import EXIT_OK, UserError
from lit_gpt_dist.model.gpt import GPT


@torch.inference_mode()
def generate_tokens(
    model: GPT,
    prompt: Tensor,
    count: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1337,
    vocabulary_size: int | None = None,
) -> Iterator[int]:
    """Yields ``count`` tokens that follow ``prompt`` (T,), T ≥ 1.

    A key/value cache holds at most a context. When it is full, the last half of the context is read again and
    generation goes on from there: what came before is forgotten.

    Args:
        temperature: 0 takes the likeliest token; 1 samples the model's own distribution.
        top_k: only the k likeliest tokens.
        top_p: only the likeliest tokens that together have this probability (Holtzman et al. 2019).
        vocabulary_size: tokens that mean something, where the model's rows are padded beyond them.
    """
    was_training = model.training
    model.eval()
    context = model.config.context
    dtype = model.head.weight.dtype
    generator = torch.Generator(prompt.device).manual_seed(seed)
    seen = prompt[-context:].tolist()
    caches, fresh = model.make_caches(1, dtype), seen
    try:
        for _ in range(count):
            if caches[0].length + len(fresh) > context:
                fresh = seen[-(context // 2 or 1) :]
                caches = model.make_caches(1, dtype)
            logits = model(torch.tensor([fresh], device=prompt.device), caches=caches)[0, -1]  # (V,)
            token = choose(logits[:vocabulary_size], temperature, top_k, top_p, generator)
            yield token
            seen.append(token)
            fresh = [token]
    finally:
        model.train(was_training)  # a sample in the middle of a run must not switch its dropout off


def choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    """One token from ``logits`` (V,).

    Raises:
        UserError: they are not finite.
    """
    if not torch.isfinite(logits).all():
        raise UserError("the model's output is not finite, so its weights are not; take an earlier checkpoint")
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.float() / temperature
    if top_k is not None and top_k < len(scaled):
        scaled[scaled < scaled.topk(top_k).values[-1]] = -torch.inf
    probabilities = scaled.softmax(dim=-1)
    if top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(0) - ordered >= top_p  # the first token is always kept
        probabilities[order[beyond]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))


def load_for_generation(path: str, device: torch.device) -> tuple[GPT, Vocabulary]:
    """The model of a checkpoint or an export on ``device``, and the vocabulary beside it.

    Raises:
        UserError: it names no vocabulary to read a prompt with.
    """
    config, document, tensors = open_weights(path)
    if document is None:
        raise UserError(
            f"{path} holds no vocabulary, so text cannot be told from tokens; give a checkpoint or an export of fit"
        )
    with torch.device("meta"):
        model = GPT(config)
    state = dict(tensors)
    model.load_state_dict(state, strict=False, assign=True)
    if config.tied:
        model.head.weight = model.embedding.weight
    return model.to(device).eval(), vocabulary_from_json(document)


def stream_text(model: GPT, vocabulary: Vocabulary, prompt: str, count: int, **sampling: object) -> Iterator[str]:
    """The text that follows ``prompt``, piece by piece as it is generated."""
    encoded = vocabulary.encode(prompt or "\n")
    tokens = torch.tensor(encoded.astype("int64"), device=model.head.weight.device)
    decoder = StreamDecoder(vocabulary)
    for token in generate_tokens(model, tokens, count, vocabulary_size=vocabulary.size, **sampling):  # type: ignore[arg-type]
        yield decoder.push(token)
    yield decoder.finish()


def parser() -> ToolParser:
    options = ToolParser(prog="lit-gpt-dist generate", description=__doc__)
    options.add_argument("weights", nargs="?", default="logs", help="a checkpoint, a run's folder, or an export")
    options.add_argument("--prompt", default="\n", help="what the text begins with")
    options.add_argument("--tokens", type=int, default=500, help="how many to generate")
    options.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    options.add_argument("--top_k", type=int, help="only the k likeliest tokens")
    options.add_argument("--top_p", type=float, help="only the likeliest tokens that together have this probability")
    options.add_argument("--seed", type=int, default=1337, help="the same seed gives the same text")
    options.add_argument("--device", help="cpu, cuda, cuda:1, ...; by default a GPU if there is one")
    return options


def check(options: argparse.Namespace) -> None:
    """Raises UserError where sampling cannot be done so."""

    def demand(name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise UserError(f"{name} {getattr(options, name)} must be {rule}")

    temperature, top_p, top_k = options.temperature, options.top_p, options.top_k
    demand("tokens", options.tokens >= 0, "at least 0")
    demand("temperature", temperature == 0 or 1e-3 <= temperature <= 1e3, "0, or between 0.001 and 1000")
    demand("top_k", top_k is None or top_k >= 1, "at least 1")
    demand("top_p", top_p is None or 0 < top_p <= 1, "above 0 and at most 1")
    demand("seed", 0 <= options.seed < 2**63, "between 0 and 2^63 - 1")


def usable_device(name: str | None) -> torch.device:
    """The device called ``name``; a GPU if there is one, where it is None."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # a build without CUDA asserts
        raise UserError(
            f"device {name} is not a device of this machine; use cpu, or cuda where there is a GPU"
        ) from error
    return device


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    check(options)
    device = usable_device(options.device)
    model, vocabulary = load_for_generation(options.weights, device)
    pieces = stream_text(
        model,
        vocabulary,
        options.prompt,
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    first = next(pieces, "")  # a prompt outside the vocabulary fails here, before anything is written
    sys.stdout.write(options.prompt + first)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    return EXIT_OK
