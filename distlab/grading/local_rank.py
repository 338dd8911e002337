"""Whether a failure comes from taking the local rank for the rank: by replay."""

from __future__ import annotations

import ast

from distlab.grading.clause import Check
from distlab.grading.harness import PlayedRuns
from distlab.grading.kit.nodes import local_rank, ranks_per_node
from distlab.grading.verdict import NotJudgedError, NotYetError

SLUG = "local-rank-as-rank"


def local_rank_used(check: Check, runs: PlayedRuns) -> NotYetError | None:
    """The verdict on a check that fails on several nodes, and would pass on one.

    It is played on one node only if the file reads `local_rank` and the reference's
    does not.
    """
    n = runs.world_size
    lines = _lines_that_read(runs.impl.source.tree)
    if not lines or _lines_that_read(runs.impl.reference.tree) or n == 1:
        return None
    try:
        check.judge(runs.on_one_node())
    except (NotYetError, NotJudgedError):
        return None
    nodes = -(-n // ranks_per_node(n))
    numbers = ", ".join(map(str, lines))
    where = f"line {numbers} uses" if len(lines) == 1 else f"lines {numbers} use"
    return NotYetError(
        f"{where} local_rank in place of rank, which works with {n} ranks on one node, "
        f"but not on {nodes} nodes",
        slug=SLUG,
        evidence=[
            (
                rank,
                f"node {rank // ranks_per_node(n)}",
                f"comm.local_rank is {local_rank(rank, n)}",
            )
            for rank in range(n)
        ],
        rule="use comm.rank: comm.local_rank starts at 0 on each node",
    )


def _lines_that_read(tree: ast.Module) -> list[int]:
    """The lines with the attribute `local_rank`."""
    lines = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "local_rank"
    }
    return sorted(lines)
