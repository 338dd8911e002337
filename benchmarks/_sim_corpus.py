"""The corpus in `tests/corpora/programs`, whole, on gloo, TCP and the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks._bars import Line, share
from distlab.runner import Cluster
from tests.corpora.programs.case import Case
from tests.corpora.programs.corpus import CASES, MODULES, TRANSPORTS, transports
from tests.corpora.programs.judge import Row, judge


def run_corpus(cases: Iterable[Case] = CASES) -> list[Row]:
    """Every program on every transport."""
    with Cluster(preload=tuple(module.__name__ for module in MODULES)) as cluster:
        return [judge(case, transports(cluster)) for case in cases]


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """The results: programs, runs, and shares of those that are as they should be."""
    hangs = [row for row in rows if row.case.outcome == "deadlock"]
    buggy = [row for row in rows if not row.case.is_right]
    return {
        "corpus_programs": len({row.case.program for row in rows}),
        "corpus_buggy_programs": len({row.case.program for row in buggy}),
        "corpus_runs": len(rows) * len(TRANSPORTS),
        "corpus_agree": share([not row.disagreements for row in rows]),
        "corpus_hangs": len(hangs),
        "corpus_line_named": share([row.line_named for row in hangs]),
        "corpus_rank_in_sentence": share([row.rank_named for row in hangs]),
        "corpus_line_named_all_bugs": share([row.line_named for row in buggy]),
    }


def as_data(row: Row) -> Line:
    """A line of the report."""
    case = row.case
    return {
        "program": case.name,
        "world_size": case.world_size,
        "expected": case.expected,
        "verdicts": {
            n: ", ".join(filter(None, (v.outcome, v.slug)))
            for n, v in row.verdicts.items()
        },
        "line": None if case.is_right else row.line_named,
        "disagreements": row.disagreements,
    }


def table(lines: Sequence[Line]) -> list[str]:
    """The programs: what is expected, what came on each transport, line named."""
    head = f"{'program':<40} {'n':>1}  {'expected':<31} " + " ".join(
        f"{name:<30}" for name in TRANSPORTS
    )
    text = [f"{head} line"]
    for line in lines:
        came = " ".join(f"{line['verdicts'][name]:<30}" for name in TRANSPORTS)
        mark = {None: "", True: "named", False: "NOT NAMED"}[line["line"]]
        text.append(
            f"{line['program']:<40} {line['world_size']:>1}  {line['expected']:<31} "
            f"{came} {mark}".rstrip()
        )
        text += [f"    DISAGREES  {problem}" for problem in line["disagreements"]]
    return text
