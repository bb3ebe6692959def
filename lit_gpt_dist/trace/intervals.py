"""Sets of time, as sorted lists of disjoint (begin, end). Pure arithmetic; any unit."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, sorted and without overlap."""
    merged: list[list[float]] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [(begin, end) for begin, end in merged]


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Time in both of two unions."""
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Time in the first union and not in the second."""
    rest = []
    for begin, end in first:
        at = begin
        for left, right in second:
            if right <= at or left >= end:
                continue
            if left > at:
                rest.append((at, left))
            at = max(at, right)
        if at < end:
            rest.append((at, end))
    return rest


def total(intervals: Iterable[Interval]) -> float:
    """Length of a union."""
    return sum(end - begin for begin, end in intervals)
