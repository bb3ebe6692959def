"""Gradients averaged over the ranks once backward is over, instead of bucket by bucket beside it.

Functions on parameters and the default process group; no Lightning here.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Of gradients sent at a time: all of a small model's, since smaller pieces are sent at less than the link's speed (1.3B parameters
# on two H200s: 9 ms for three pieces or one, 14 ms for ten); not all of a large one's, which are copied for that
PIECE_ELEMENTS = 2**29

Finish = Callable[[], None]


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Replaces each gradient by its mean over the ranks, in its own type. Other tensors hold them afterwards."""
    in_turn(_reduce(piece) for piece in pieces(parameters))


def exchange_gradients(
    parameters: Sequence[Tensor], dtype: torch.dtype, average: Callable[[Tensor, Tensor], None]
) -> None:
    """As ``average_gradients``, for two ranks whose gradients are numbers of ``dtype``, such as backward leaves in bf16 under
    ``bf16-mixed`` for one micro-batch: each sends the other all of its own as such, half the bytes of an all-reduce in fp32, and
    both add up in the gradients' type. Nothing is lost.

    Args:
        average: ``mean_of_ranks``, perhaps compiled.
    """
    assert dist.get_world_size() == 2, "each rank would have to send all of its gradients to all others"
    in_turn(_exchange(piece, dtype, average) for piece in pieces(parameters))


def in_turn(sends: Iterator[Finish]) -> None:
    """Begins each, and finishes it once the next has begun: one is packed while another is on its way."""
    finish_last: Finish | None = None
    for finish in sends:
        if finish_last is not None:
            finish_last()
        finish_last = finish
    if finish_last is not None:
        finish_last()


def _reduce(piece: list[Tensor]) -> Finish:
    packed = pack(piece, gradient_of(piece[0]).new_empty(count(piece)))
    packed /= dist.get_world_size()  # before the sum, as DDP does: gloo has no mean
    work = dist.all_reduce(packed, async_op=True)

    def finish() -> None:
        work.wait()
        unpack(piece, packed)

    return finish


def _exchange(piece: list[Tensor], dtype: torch.dtype, average: Callable[[Tensor, Tensor], None]) -> Finish:
    size, rank = count(piece), dist.get_rank()
    both = torch.empty(2, size, dtype=dtype, device=piece[0].device)
    pack(piece, both[rank])
    to_other = [size * (other != rank) for other in range(2)]
    work = dist.all_to_all_single(both[1 - rank], both[rank], to_other, to_other, async_op=True)

    def finish() -> None:
        work.wait()
        mean = gradient_of(piece[0]).new_empty(size)
        average(both, mean)
        unpack(piece, mean)

    return finish


def mean_of_ranks(parts: Tensor, mean: Tensor) -> None:
    """Over the rows of ``parts`` (ranks, n), in the type of ``mean`` (n,). A kernel of PyTorch's own takes twice as long for so
    few rows as one that is compiled."""
    mean.copy_(parts.mean(dim=0, dtype=mean.dtype))


def are_numbers_of(dtype: torch.dtype, parameters: Sequence[Tensor]) -> bool:
    """Whether casting the gradients to ``dtype`` would lose nothing. Waits for the device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    same = [(gradient.to(dtype) == gradient).all() | ~gradient.isfinite().all() for gradient in gradients]
    return not same or bool(torch.stack(same).all())


def pieces(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Whole parameters, at most ``PIECE_ELEMENTS`` together but for a single one that has more.

    Where there is no gradient it is zero: another rank may have one, and all must send the same.
    """
    found: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if found and size + parameter.numel() > PIECE_ELEMENTS:
            yield found
            found, size = [], 0
        found.append(parameter)
        size += parameter.numel()
    if found:
        yield found


def count(piece: Sequence[Tensor]) -> int:
    return sum(parameter.numel() for parameter in piece)


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def pack(piece: Sequence[Tensor], flat: Tensor) -> Tensor:
    """The gradients one behind another in ``flat``, by one kernel, cast to its type."""
    places = flat.split([parameter.numel() for parameter in piece])
    gradients = [gradient_of(parameter) for parameter in piece]
    torch._foreach_copy_([place.view_as(of) for place, of in zip(places, gradients, strict=True)], gradients)
    return flat


def unpack(piece: Sequence[Tensor], flat: Tensor) -> None:
    """Parts of ``flat`` become the gradients."""
    for parameter, part in zip(piece, flat.split([parameter.numel() for parameter in piece]), strict=True):
        parameter.grad = part.view_as(parameter)
