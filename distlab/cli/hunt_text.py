"""Make the file for a hunt, and find out which of its lines are wrong.

The file is a unit's template with one broken function, and some tasks still to write.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distlab.curriculum.functions import without_markers
from distlab.curriculum.regions import find_regions, make_template


def hunted_text(solution: str, filled: Collection[str]) -> str:
    """Return the unit's template with the solution's code filled in for some tasks.

    `filled` names these tasks, and all others stay unwritten. `solution` may already
    contain the mistake.
    """
    lines = solution.splitlines(keepends=True)
    for region in reversed(find_regions(solution)):
        if region.id in filled:
            code = without_markers("".join(lines[region.first - 1 : region.last]))
            lines[region.first - 1 : region.last] = [code]
    return make_template("".join(lines))


def guilty_lines(right: str, broken: str) -> frozenset[int]:
    """Return the numbers of the wrong lines in `broken`, counting from 1.

    A line that was moved counts as wrong in its new place, and if two lines were
    swapped, both count. If lines are only missing, we count the two lines around the
    gap.
    """
    before, after = right.splitlines(), broken.splitlines()
    start = _alike(before, after)
    end = _alike(before[start:][::-1], after[start:][::-1])
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    common = _most_in_common(old, new)
    lines = {
        start + place + 1
        for place in range(len(new))
        if _most_in_common(old, new[:place] + new[place + 1 :]) == common
    }
    lines = {n for n in lines if after[n - 1].strip()}
    if not lines and before != after:
        gap = start + _alike(old, new)
        lines = {gap, gap + 1}
    return frozenset(n for n in lines if 1 <= n <= len(after) and after[n - 1].strip())


def _alike(one: Sequence[str], other: Sequence[str]) -> int:
    """Count how many lines at the beginning are the same in both."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _most_in_common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence of lines."""
    row = [0] * (len(other) + 1)
    for line in one:
        last = row
        row = [0]
        for place, also in enumerate(other):
            longest = max(row[place], last[place + 1])
            row.append(last[place] + 1 if line == also else longest)
    return row[-1]
