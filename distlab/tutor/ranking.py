"""Find the concepts that a question is about, by a deterministic ranking of text.

Source: S. Robertson and H. Zaragoza, The Probabilistic Relevance Framework: BM25 and
Beyond (2009), sections 3.5 and 3.6. A word counts more if it is rare and if it is in a
title rather than in a text, and it counts less each time it is repeated.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from distlab.tutor.concepts import Concept, read_concepts

TIE = 0.95  # of the best score; a concept that reaches it fits equally well
_LEAST = 0.5  # the share of the question's weight that the best answer must cover
_SATURATION = 1.2
_WEIGHTS = {"title": 3.0, "asks": 2.0, "text": 0.6}
_STOP = frozenset(
    """
    a about across all also am an and any are as at be because been but by can could
    did down during do does doing done each every for from get give go goes had has
    have how i if in instead into is it its just let me more most much my need no
    not of on one only or other our out over own please should so some take takes
    tell than that the their them then there these they this those through to too
    under up us use used uses using very want was we were what when where which
    while who whole whose why will with without would you your mean means work works
    happen happens difference between
    """.split()  # noqa: SIM905 - a text is easier to read
)
_SAME = {
    "gpus": "gpu", "device": "gpu", "devices": "gpu", "worker": "rank",
    "workers": "rank", "processes": "process", "dies": "die", "died": "die",
    "dead": "die", "killed": "kill",
    "sync": "synchronize", "validation": "evaluate", "evaluation": "evaluate",
    "bigger": "large", "larger": "large", "big": "large", "halves": "half",
    "averaged": "average", "averaging": "average", "slower": "slow",
    "faster": "fast", "quicker": "fast", "quick": "fast", "stuck": "hang",
    "hangs": "hang", "hanging": "hang", "hung": "hang", "freezes": "hang",
    "sent": "send", "lr": "rate", "float16": "fp16", "half": "fp16",
    "bfloat16": "bf16", "metric": "evaluate", "metrics": "evaluate",
    "h100": "gpu", "h100s": "gpu", "h200": "gpu", "a100": "gpu", "a100s": "gpu",
    "llama": "model", "losses": "loss",
    "machine": "node", "machines": "node", "servers": "server",
}  # fmt: skip
_JOINED = re.compile(
    r"\b(all|reduce|ring)[-_ ]?(reduce|gather|scatter)\b|\ball[-_ ]to[-_ ]all\b"
)
_SIZE = re.compile(r"\b[0-9]+(?:\.[0-9]+)?[ -]?b\b")  # 7B, as a model's size


@dataclass(frozen=True)
class Near:
    """A concept and its score for a question; higher is nearer."""

    concept: Concept
    score: float


def words_of(text: str) -> list[str]:
    """Return the words of a text that count, without their endings.

    >>> words_of("Why does my all-reduce hang?")
    ['allreduce', 'hang']
    """
    text = _JOINED.sub(lambda match: re.sub(r"[-_ ]", "", match[0]), text.lower())
    text = _SIZE.sub("billions", text)
    words = re.findall(r"[a-z0-9αβ]+", text.replace("_", " "))
    return [stem(word) for word in words if word not in _STOP]


def stem(word: str) -> str:
    """Strip English endings. Rough, but questions and texts are treated alike."""
    word = _SAME.get(word, word)
    for ending in ("ization", "izing", "ized", "izes"):
        if word.endswith(ending):
            return word.removesuffix(ending) + "ize"
    for ending in ("ing", "ed", "es", "s", "ly", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            if ending == "s" and word.endswith("ss"):
                continue
            word = word.removesuffix(ending)
            break
    return _SAME.get(word, word)


def nearest(question: str, most: int = 5) -> list[Near]:
    """Return the concepts nearest to a question, nearest first, if any fits."""
    asked = list(dict.fromkeys(words_of(question)))
    index = _index()
    found = [
        Near(concept, score)
        for concept in read_concepts().values()
        if (score := index.score(asked, concept.name)) > 0
    ]
    found.sort(key=lambda near: (-near.score, near.concept.name))
    if not found or index.covered(asked, found[0].concept.name) < _LEAST:
        return []
    return found[:most]


def ties(found: list[Near]) -> list[Near]:
    """Return the first concept and those that fit as well as it does."""
    return [near for near in found if near.score >= TIE * found[0].score]


# ── the index ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Index:
    weights: Mapping[str, Mapping[str, float]]  # concept → word → its weight there
    rarity: Mapping[str, float]
    rarest: float

    def score(self, asked: Iterable[str], name: str) -> float:
        own = self.weights[name]
        return sum(
            self.rarity[word] * own[word] / (_SATURATION + own[word])
            for word in asked
            if word in own
        )

    def covered(self, asked: list[str], name: str) -> float:
        """Return the share of the question's weight that this concept's words cover.

        It is 0 if none of them is in its title or its questions.
        """
        weight = {word: self.rarity.get(word, self.rarest) for word in asked}
        own = self.weights[name]
        if not any(own.get(word, 0.0) >= _WEIGHTS["asks"] for word in asked):
            return 0.0  # only its text mentions them, in passing
        total = sum(weight.values())
        return sum(weight[word] for word in asked if word in own) / max(total, 1e-9)


@cache
def _index() -> _Index:
    concepts = read_concepts().values()
    weights = {concept.name: _weights_of(concept) for concept in concepts}
    count = Counter(word for own in weights.values() for word in own)
    rarity = {
        word: math.log(1 + (len(weights) - c + 0.5) / (c + 0.5))
        for word, c in count.items()
    }
    return _Index(weights, rarity, math.log(1 + 2 * len(weights)))


def _weights_of(concept: Concept) -> dict[str, float]:
    fields = {
        "title": " ".join([concept.title, concept.name, *concept.also]),
        "asks": " ".join(concept.asks),
        "text": concept.text,
    }
    own: Counter[str] = Counter()
    for field, text in fields.items():
        for word in words_of(text):
            own[word] += _WEIGHTS[field]  # type: ignore[assignment]
    return dict(own)
