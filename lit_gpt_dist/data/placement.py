"""The part of a corpus to train on and the part to validate on, and where their windows are gathered: on the host, or from
a copy on the device. Knows nothing of steps, batches or ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_gpt_dist.data.corpus import Corpus, load_corpus
from lit_gpt_dist.data.loaders import torch_tokens
from lit_gpt_dist.data.stream import TokenStream
from lit_gpt_dist.errors import UserError

DEVICE_BYTES = 512 << 20  # a corpus up to this size lives on the device
READ_AHEAD_WORKERS = 2


@dataclass(frozen=True)
class Parts:
    """What of a corpus is trained on and what is validated on, which may be another corpus in the same vocabulary."""

    corpus: Corpus
    train: TokenStream
    validation: TokenStream
    val_corpus: str | None = None  # the other corpus

    def describe(self) -> str:
        """One line for the start of a run."""
        corpus, kind = self.corpus, f"{self.corpus.vocabulary.kind}, vocabulary {self.corpus.vocabulary.size}"
        apart = f" in {self.val_corpus}" if self.val_corpus else ""
        parts = f"{len(self.train):,} tokens to train, {len(self.validation):,} to validate{apart}"
        dropped = sum(corpus.dropped.values())
        note = f", {dropped:,} characters outside the vocabulary dropped" if dropped else ""
        skipped = f", {corpus.skipped:,} files or folders skipped (prepare names them)" if corpus.skipped else ""
        return f"{corpus.name} ({kind}): {parts}{note}{skipped}"


def cut(corpus: Corpus, val_fraction: float, val_corpus: str | None, context: int) -> Parts:
    """Cuts the validation part off the corpus's end, or takes all of another corpus for it.

    Raises:
        UserError: a part too short for one window, or another corpus with another vocabulary.
    """
    if not val_corpus:
        return Parts(corpus, *corpus.split(val_fraction, context))
    train, _ = corpus.split(0.0, context)
    return Parts(corpus, train, _all_of(val_corpus, corpus, context), val_corpus)


def _all_of(path: str, beside: Corpus, context: int) -> TokenStream:
    """A whole corpus to validate on, in the vocabulary of the one that is trained on."""
    other, vocabulary = load_corpus(path, usual=beside.vocabulary), beside.vocabulary
    if other.vocabulary != vocabulary:
        raise UserError(
            f"val_corpus {path} was prepared with another vocabulary ({other.vocabulary.kind} of {other.vocabulary.size}) than "
            f"{beside.name} ({vocabulary.kind} of {vocabulary.size}); give the text, or prepare both alike"
        )
    return other.split(0.0, context)[0]


class Placement:
    """Decides where windows are gathered, and gathers them: from a copy on the device, or on the host, by workers or without.

    Args:
        parts: what windows are gathered from
        device: this rank's
        on_device: keep a copy of the corpus on an accelerator; None: where it is small enough
        workers: processes that read ahead on the host; None: as many as the device needs
    """

    def __init__(self, parts: Parts, device: torch.device, on_device: bool | None, workers: int | None) -> None:
        token_bytes = 1 if parts.corpus.vocabulary.size <= 256 else 4
        small = len(parts.corpus) * token_bytes <= DEVICE_BYTES
        wanted = small and not workers if on_device is None else on_device
        self.parts = parts
        on_accelerator = device.type != "cpu"
        self.on_device = wanted and on_accelerator  # a CPU gathers from the corpus as it is, without a copy
        default_workers = READ_AHEAD_WORKERS if on_accelerator and not self.on_device else 0
        self.workers = default_workers if workers is None else workers
        self.copy: Tensor | None = None

    @property
    def reads_ahead(self) -> bool:
        """Whether training windows are read on the host before their step asks for them."""
        return not self.on_device

    def gather(self, part: TokenStream, starts: Tensor, length: int, device: torch.device) -> Tensor:
        """Windows of a part at ``starts`` (any shape): (*starts.shape, length) int64 on ``device``."""
        elsewhere = self.parts.val_corpus and part is self.parts.validation  # only the corpus itself is copied
        if not self.on_device or elsewhere:
            return torch_tokens(part.gather(starts.numpy(), length)).to(device).long()
        if self.copy is None or self.copy.device != device:
            self.copy = torch_tokens(self.parts.corpus.tokens.to_numpy()).to(device)
        windows = self.copy.unfold(0, length, 1)  # a view: one window for each position
        first = starts.to(device, non_blocking=True)
        return windows[first + part.offset if part.offset else first].long()

    def release(self) -> None:
        """Gives the device memory back; the next ``gather`` makes the copy anew."""
        self.copy = None
