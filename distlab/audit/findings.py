"""A finding: a name, a line, a sentence; and the list of all names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.audit.places import Place

NAMES = {
    "set-epoch": "the sampler shuffles every epoch in the same order",
    "samples-repeated": "a sample is read more than once in an epoch",
    "samples-lost": "a sample is never read",
    "samples-padded": "the sampler repeats samples to make the ranks' shares equal",
    "padded-evaluation": "an evaluation counts samples that were added as padding",
    "replicas-differ": "the ranks' copies of the model are no longer the same",
    "unused-parameters": "a parameter gets no gradient",
    "same-random-numbers": "ranks or workers draw the same random numbers",
    "rank-condition": "only some ranks make a collective call",
    "save-needs-all": "one rank saves, but the state is on all of them",
    "mean-of-means": "means of unequal numbers of samples are averaged",
    "token-weights": "micro-batches with unequal numbers of tokens weigh the same",
    "global-batch": "the number of samples per step grows with the number of ranks",
    "learning-rate": "the learning rate depends on the number of ranks",
    "not-the-same-training": "n ranks do not train as one rank does",
    "failed": "the script ended with an error",
}
NOTES = frozenset({"samples-padded"})
"""Names that are worth knowing and are no mistake: they don't change the exit code."""


@dataclass(frozen=True, order=True)
class Finding:
    """What was found, and the line that has to change."""

    at: Place
    name: str
    said: str  # what was observed, as one sentence
    advice: str = ""  # what to do about it

    @property
    def is_note(self) -> bool:
        """Whether it is no mistake."""
        return self.name in NOTES

    def as_json(self) -> dict[str, Any]:
        """Return it for `--json`."""
        return {
            "name": self.name,
            "file": self.at.file,
            "line": self.at.line,
            "said": self.said,
            "advice": self.advice,
            "note": self.is_note,
        }

    def shown_at(self, folder: Path) -> str:
        """Return `train.py:41`, relative to a folder where that is shorter."""
        path = Path(self.at.file)
        inside = path.is_relative_to(folder)
        return f"{path.relative_to(folder) if inside else path}:{self.at.line}"
