"""`explain_ddp_concepts` gives an overview of the course, or answers one question."""

from __future__ import annotations

from typing import Any

from distlab.curriculum import load_curriculum
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.tutor.answers import answer, topics
from distlab.tutor.concepts import find_concept, read_concepts
from distlab.tutor.pages import plain
from distlab.tutor.ranking import nearest, ties

_WORKFLOW = (
    ("start n processes of one file", "launcher"),
    ("join the process group and choose the GPU", "process-group"),
    ("give every rank the weights of rank 0", "broadcast"),
    (
        "read a shard of one shuffle, newly shuffled in each epoch",
        "distributed-sampler",
    ),
    ("average the gradients of each step over the ranks", "gradient-averaging"),
    ("sum the right answers over all ranks, then divide", "distributed-evaluation"),
    ("save a checkpoint that no crash can tear", "checkpoint"),
)
_MISTAKES = (
    "sum-not-mean",
    "collective-mismatch",
    "different-order",
    "epoch-not-set",
    "local-metrics",
    "unequal-start",
    "buffers-forgotten",
    "batch-grows-with-ranks",
)
_PRACTICES = (
    "Compare n ranks with one process by their weights, up to rounding; not accuracy.",
    "Compare the weights of all ranks bit for bit while you develop.",
    "Try 1, 2, 3 and 4 ranks, and a number of samples that 4 doesn't divide.",
    "Call every collective on every rank, in the same order, outside of rank branches.",
    "Write files on one rank, and let the others wait only before they read them.",
    "Measure the time for data, compute and communication on each rank.",
)


def explain_ddp_concepts(question: str | None = None) -> dict[str, Any]:
    """Explain the concept nearest to a name or a question, or list all of them.

    Without a question, the result has topics, workflow, common_mistakes and
    best_practices. With one, it has the explanation as text, the names of the nearest
    concepts as topics, nearest first, and as ties those that fit as well as the first.

    Raises:
        ValueError: no explanation fits.
    """
    if not question or not question.strip():
        return _overview()
    text = plain(answer(question, load_curriculum()))
    exact = find_concept(question) if len(question) < 80 else None
    found = [] if exact else nearest(question[:2_000])
    names = [exact.name] if exact else [near.concept.name for near in found]
    equal = [near.concept.name for near in ties(found)] if found else names
    return {"text": text, "topics": names, "ties": equal}


def _overview() -> dict[str, Any]:
    concepts, known = read_concepts(), read_misconceptions()
    return {
        "topics": {
            topic: {name: concepts[name].title for name in names}
            for topic, names in topics().items()
        },
        "workflow": [
            {"step": step, "concept": name, "example": concepts[name].snippet}
            for step, name in _WORKFLOW
        ],
        "common_mistakes": {slug: known[slug]["title"] for slug in _MISTAKES},
        "best_practices": list(_PRACTICES),
    }
