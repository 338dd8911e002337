"""Answer a name, a question, or a pasted error with the explanation that fits."""

from __future__ import annotations

import difflib

from distlab.curriculum import Curriculum
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.curriculum.torch_errors import find_torch_errors, read_torch_errors
from distlab.tutor.concepts import find_concept, read_concepts
from distlab.tutor.pages import (
    Command,
    Lines,
    concept_page,
    mistake_page,
    rows,
    torch_error_page,
    typed,
)
from distlab.tutor.ranking import Near, nearest, ties

_NEAR = 12  # at most this many names for one word
_ALSO = 3  # concepts listed below the one that is shown
_MOST = 1_000_000  # search only the last characters of a long log


def answer(asked: str, curriculum: Curriculum, command: Command = typed) -> Lines:
    """Explain a name, a word, a question, or a text that contains an error of torch.

    Raises:
        ValueError: no explanation fits.
    """
    known = read_misconceptions()
    name = asked.strip("[] \n")
    if name in known:
        return mistake_page(name, known[name])
    concept = find_concept(name) if len(name) < 80 else None
    if concept:
        return concept_page(concept, curriculum, command)
    by_name = [error for error in read_torch_errors() if error.name == name]
    errors = by_name or find_torch_errors(asked[-_MOST:])
    if errors:
        return torch_error_page(errors, command)
    if len(name.split()) > 1:
        return _question(name, curriculum, command)
    near = _about(name, known)
    concepts = [near.concept for near in nearest(name)] if name else []
    if not near and not concepts:
        raise ValueError(f"no explanation is called {name!r} or mentions it")
    entries = [(concept.name, concept.title) for concept in concepts]
    entries += [(slug, known[slug]["title"]) for slug in near]
    head = f"These explanations are about {name!r}:"
    return [("plain", head), ("plain", ""), *rows(entries)]


def _question(question: str, curriculum: Curriculum, command: Command) -> Lines:
    found = nearest(question, most=_ALSO + 2) if len(question) < 2_000 else []
    if not found:
        raise ValueError(
            "we have no explanation of this error; look for the earliest traceback of "
            "any rank, and paste its last line"
        )
    equal = ties(found)
    lines: Lines = []
    if len(equal) > 1:
        names = ", ".join(near.concept.name for near in equal)
        lines += [("rule", f"{names} fit equally well; here is the first."), _EMPTY]
    lines += concept_page(found[0].concept, curriculum, command)
    also = found[1 : _ALSO + 1]
    if also:
        lines += [_EMPTY, ("rule", "Related"), *_rows_of(also)]
    return lines


_EMPTY = ("plain", "")


def _rows_of(found: list[Near]) -> Lines:
    return rows((near.concept.name, near.concept.title) for near in found)


def _about(word: str, known: dict[str, dict[str, str]]) -> list[str]:
    """Find the slugs for a word by name, title and spelling, and then by text."""
    word = word.lower()
    near = [name for name in known if word in name or name in word]
    near += [name for name, entry in known.items() if word in entry["title"].lower()]
    near += difflib.get_close_matches(word, known, 3, 0.6)
    near += [name for name, entry in known.items() if word in entry["happened"].lower()]
    near += [name for name, entry in known.items() if word in entry["torch"].lower()]
    return list(dict.fromkeys(near))[:_NEAR]


def topics() -> dict[str, tuple[str, ...]]:
    """Return the names of all concepts by topic."""
    found: dict[str, list[str]] = {}
    for concept in read_concepts().values():
        found.setdefault(concept.topic, []).append(concept.name)
    return {topic: tuple(names) for topic, names in found.items()}
