"""What the lab of phase 3 computes itself: the fit of α and β, and its tables."""

import pytest

from distlab.walkthroughs.phase3 import fit
from distlab.walkthroughs.phase3_lab import print_choices, print_table


def test_the_fit_finds_alpha_and_beta() -> None:
    sizes = [1_000, 10_000, 100_000]
    alpha_s, s_per_byte = fit(sizes, [2e-6 + 3e-9 * size for size in sizes])
    assert alpha_s == pytest.approx(2e-6)
    assert s_per_byte == pytest.approx(3e-9)


def test_a_table_has_a_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "8": {"ring": 1234.56, "steps": 14, "end": "failed"},
        "16": {"ring": 7.0, "steps": 1234, "end": ""},
    }
    print_table(rows, "ranks", digits=1)
    assert capsys.readouterr().out.splitlines() == [
        "ranks      ring   steps      end",
        "8       1,234.6      14   failed",
        "16          7.0   1,234         ",
    ]


def test_choices_are_printed_as_letters(capsys: pytest.CaptureFixture[str]) -> None:
    print_choices((8, 16), {"a": [["ring"], ["naive"]], "b": [["ring"], ["ring"]]})
    assert capsys.readouterr().out.splitlines() == [
        "ranks   a   b",
        "    8   r   r",
        "   16   n   r",
    ]
