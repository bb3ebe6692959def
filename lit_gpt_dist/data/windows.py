"""Which windows a step takes: pure functions of (seed, step). Knows nothing of files, devices or processes.

The numbers come from a counter-based hash written out here, not from a library's generator, so the stream of a run
never changes with the version of numpy or torch. A *window* is one sequence of context + 1 tokens, named by the
position of its first token.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lit_gpt_dist.errors import UserError

Starts = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of SplitMix64
_RANDOM_STREAM, _EPOCH_STREAM = 1, 2  # keep the two ways to draw independent of each other
_FEISTEL_ROUNDS = 6  # 4 give a pseudorandom permutation (Luby and Rackoff 1988); two more cost little


def mix(words: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def hash_words(*numbers: int) -> int:
    """One 64-bit word that depends on every number and on their order; negative numbers count modulo 2^64."""
    word = 0
    for number in numbers:
        word ^= (number + _GAMMA) & _MASK
        # ``mix`` of a single Python number, which takes numpy ten times as long
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        word ^= word >> 31
    return word


def random_starts(seed: int, step: int, count: int, positions: int) -> Starts:
    """``count`` positions in [0, ``positions``) with replacement, for the global batch of ``step``."""
    return random_starts_of_steps(seed, (step,), count, positions)[0]


def random_starts_of_steps(seed: int, steps: Iterable[int], count: int, positions: int) -> Starts:
    """The same of each of ``steps``, (steps, count): many at once take hardly longer than one.

    The remainder of a 64-bit word favours small positions by less than positions / 2^64.
    """
    keys = np.array([hash_words(_RANDOM_STREAM, seed, step) for step in steps], np.uint64)
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA) + keys[:, np.newaxis]  # (steps, count)
    return (mix(counters) % np.uint64(positions)).astype(np.int64)


def epoch_starts(seed: int, step: int, count: int, windows: int, context: int) -> Starts:
    """Positions of the ``count`` windows of ``step`` when every window of a shuffled epoch comes exactly once.

    Window k of the endless shuffled stream is g = step · count + k, of epoch g // windows; an epoch may end within a
    global batch. The order of an epoch is a permutation that is computed, never stored.
    """
    stream = step * count + np.arange(count, dtype=np.int64)
    starts = np.empty(count, np.int64)
    epochs = stream // windows
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        of_epoch = epochs == epoch
        starts[of_epoch] = permute(stream[of_epoch] % windows, windows, hash_words(_EPOCH_STREAM, seed, epoch))
    return starts * context


def permute(places: Starts, size: int, key: int) -> Starts:
    """The image of each place under a permutation of [0, ``size``) chosen by ``key``.

    A Feistel network permutes [0, 4^k); walking its cycles until the value falls below ``size`` restricts it to
    [0, size) (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). 4^k < 4 · size, so few walks are needed.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    values = _feistel(places.astype(np.uint64), half_bits, key)
    while (outside := values >= np.uint64(size)).any():
        values[outside] = _feistel(values[outside], half_bits, key)
    return values.astype(np.int64)


def _feistel(values: Words, half_bits: int, key: int) -> Words:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for turn in range(_FEISTEL_ROUNDS):
        # the high bits of the hash: they are mixed best
        turned = mix(right ^ np.array([hash_words(key, turn)], np.uint64)) >> np.uint64(64 - half_bits)
        left, right = right, left ^ turned
    return (left << bits) | right


def rank_starts(starts: Starts, micro: int, rank: int, ranks: int) -> Starts:
    """What one data rank takes of a step's global batch: shape (accumulate, micro).

    Micro-batch m of rank r of R takes windows [(m·R + r)·micro, …+micro): the same windows fall into the same step
    whatever the number of ranks.
    """
    return starts.reshape(-1, ranks, micro)[:, rank]  # (accumulate, rank, micro)


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is split: global = micro × accumulate × ranks. Counted in windows, ranks are data ranks."""

    global_batch: int
    micro_batch: int
    accumulate: int
    ranks: int

    def __str__(self) -> str:
        return (
            f"global batch {self.global_batch} = micro {self.micro_batch} × accumulate {self.accumulate} "
            f"× {self.ranks} data rank{'s' if self.ranks > 1 else ''}"
        )


def plan_batch(global_batch: int | None, micro_batch: int, accumulate: int | None, ranks: int) -> BatchPlan:
    """The split that follows from what is given; ``accumulate`` follows from ``global_batch`` or is 1.

    Raises:
        UserError: a number below 1, a global batch that does not divide, or one that disagrees with ``accumulate``.
    """
    given = (("global batch", global_batch), ("micro batch", micro_batch), ("accumulate", accumulate))
    for name, value in given:
        if value is not None and value < 1:
            raise UserError(f"{name} {value} is not at least 1; give a positive number of windows")
    if global_batch is None:
        return BatchPlan(micro_batch * (accumulate or 1) * ranks, micro_batch, accumulate or 1, ranks)
    per_pass = micro_batch * ranks  # windows that all ranks forward at once
    if accumulate is not None and global_batch != per_pass * accumulate:
        raise UserError(
            f"global batch {global_batch} is not micro batch {micro_batch} × accumulate {accumulate} × {ranks} data ranks"
            f" = {per_pass * accumulate}; use a global batch of {per_pass * accumulate}, or leave one of them out"
        )
    if global_batch % per_pass:
        raise UserError(_does_not_divide(global_batch, micro_batch, ranks))
    return BatchPlan(global_batch, micro_batch, global_batch // per_pass, ranks)


def usual_micro(most: int, global_batch: int | None, accumulate: int | None, ranks: int) -> int:
    """The micro-batch of someone who gives none: ``most``, or the largest below it with which the global batch divides."""
    share = (global_batch or 0) // (ranks * (accumulate or 1))  # windows of one rank in a step, or in one pass of it
    fits = [n for n in range(1, min(most, share) + 1) if share % n == 0]
    return max(fits, default=most)


def _does_not_divide(global_batch: int, micro_batch: int, ranks: int) -> str:
    per_pass = micro_batch * ranks
    below = global_batch // per_pass * per_pass
    remedies = [f"{below} or {below + per_pass}" if below else f"{per_pass}"]
    if global_batch % ranks == 0:
        share = global_batch // ranks
        fits = max(n for n in range(1, min(micro_batch, share) + 1) if share % n == 0)
        remedies.append(f"a micro batch of {fits} and accumulate {share // fits}")
    return (
        f"global batch {global_batch} is not divisible by micro batch {micro_batch} × {ranks} data ranks = {per_pass}"
        f" (accumulate would be {global_batch / per_pass:.2f}); use a global batch of {', or '.join(remedies)}"
    )
