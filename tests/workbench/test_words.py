"""What learners read uses the field's terms: see GLOSSARY.md and words.py.

pytest tests/workbench/test_words.py -k ring_allreduce    one unit's texts
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workbench.words import (
    Use,
    identifiers_in,
    messages_of,
    text_of,
    titles_of,
    words_in,
)

ROOT = Path(__file__).resolve().parents[2]


def _files(*patterns: str) -> list[Path]:
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


READ = {
    text_of: _files(
        "README.md",
        "AGENTS.md",
        "TUTOR.md",
        "curriculum.toml",
        "phase*/guidelines.md",
        "phase*/guide/*.md",
        "phase*/hints/*.md",
        "phase*/answers.toml",
        "phase*/walkthrough.ipynb",
        "phase*/figures/*.svg",
        "figures/*.svg",
        "solutions/*/*.py",
        "distlab/curriculum/*.toml",
        "distlab/curriculum/misconceptions/*.toml",
        "distlab/tutor/concepts/*.toml",
    ),
    messages_of: _files(
        "distlab/cli/*.py",
        "distlab/grading/**/*.py",
        "distlab/runner/*.py",
        "distlab/trace/*.py",
        "distlab/tutor/*.py",
        "distlab/sim/**/*.py",
    ),
    titles_of: _files("tests/mutants/*/*.toml"),
}
TEXTS = [
    pytest.param(read, path, id=f"{path.relative_to(ROOT)}")
    for read, paths in READ.items()
    for path in paths
]
UNITS = [pytest.param(path, id=path.stem) for path in _files("solutions/phase*/*.py")]


def _listed(path: Path, uses: list[Use]) -> str:
    name = path.relative_to(ROOT)
    return "\n".join(f"{name}:{u.line}: {u.word!r}, say: {u.say}" for u in uses)


@pytest.mark.parametrize(("read", "path"), TEXTS)
def test_texts_use_the_words_of_the_field(
    read: Callable[[Path], str], path: Path
) -> None:
    uses = words_in(read(path))
    assert not uses, "\n" + _listed(path, uses)


@pytest.mark.parametrize("path", UNITS)
def test_solutions_use_the_names_of_the_field(path: Path) -> None:
    uses = identifiers_in(path.read_text(encoding="utf-8"))
    assert not uses, "\n" + _listed(path, uses)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Each island has a switch.", "island"),
        ("Copy it into the\nbox of rank 1.", "box"),
        ("It takes a v-th of the time.", "a v-th"),
        ("Foretell its time.", "Foretell"),
        ("The ranks hand\nback their gradients.", "hand back"),
    ],
)
def test_a_planted_word_is_found(text: str, word: str) -> None:
    assert [use.word for use in words_in(text)] == [word]


def test_a_planted_identifier_is_found() -> None:
    source = "def f(comm, like):\n    box = like\n    right = 1\n"
    assert [(use.line, use.word) for use in identifiers_in(source)] == [
        (1, "like"),
        (2, "box"),
    ]


def test_strings_are_read_and_docstrings_are_not(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text('"""An island here."""\nX = 1\nY = f"{X} is in a box, {X}"\n')
    assert [(use.line, use.word) for use in words_in(messages_of(file))] == [(3, "box")]
