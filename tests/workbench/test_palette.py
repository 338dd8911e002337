"""Colors of the pictures: readable text, one meaning each, and no color but those."""

from __future__ import annotations

import ast
import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from distlab.trace import palette
from distlab.trace.canvas import Canvas

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted([*ROOT.glob("phase*/figures/*.svg"), *ROOT.glob("figures/*.svg")])
SOURCES = sorted(
    [
        *(ROOT / "figures").glob("*.py"),
        *(ROOT / "distlab" / "walkthroughs").glob("*pictures.py"),
        *(ROOT / "distlab" / "walkthroughs").glob("*lab.py"),
        ROOT / "distlab" / "trace" / "canvas.py",
        ROOT / "distlab" / "trace" / "timeline.py",
    ]
)
LEAST = 4.5  # WCAG 2, level AA, for text of any size
APART = 20.0  # in CIELAB, for two fills of one picture
DEUTERANOPIA = (  # Machado, Oliveira, Fernandes (2009), in linear RGB
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
AS_IT_IS = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
Matrix = tuple[tuple[float, float, float], ...]


class Weak(NamedTuple):
    """A text that is hard to read."""

    text: str
    color: str
    fill: str


def names() -> dict[str, str]:
    """Every color of the palette by its meaning; a tuple's by their places."""
    found: dict[str, str] = {}
    for name, value in vars(palette).items():
        if name.isupper() and isinstance(value, str):
            found[name] = value
        elif name in ("RANK_COLORS", "PARTIAL_SUMS", "METHODS"):
            found |= {f"{name}[{place}]": color for place, color in enumerate(value)}
    return found


def covers(shape: ET.Element, x: float, y: float) -> bool:
    """Whether a filled rectangle or circle is behind the point."""
    if shape.get("fill", "none") == "none":
        return False
    if shape.tag.endswith("rect"):
        left, top, wide, high = (
            float(shape.get(side, "0")) for side in ("x", "y", "width", "height")
        )
        return left <= x <= left + wide and top <= y <= top + high
    if shape.tag.endswith("circle"):
        across, down, r = (float(shape.get(side, "0")) for side in ("cx", "cy", "r"))
        return (x - across) ** 2 + (y - down) ** 2 <= r**2
    return False


def written(svg: str) -> Iterator[Weak]:
    """Each text of a picture with its color and the fill behind its middle."""
    shapes: list[ET.Element] = []
    for element in ET.fromstring(svg).iter():
        if not element.tag.endswith("}text"):
            shapes.append(element)
            continue
        text, size = element.text or "", float(element.get("font-size", "0"))
        shift = {"start": 1, "middle": 0, "end": -1}[element.get("text-anchor", "")]
        x = float(element.get("x", "0")) + shift * 0.3 * size * len(text)
        y = float(element.get("y", "0")) - size / 3
        fill = next(s.get("fill", "") for s in reversed(shapes) if covers(s, x, y))
        yield Weak(text, element.get("fill", ""), fill)


def weak(svg: str) -> list[Weak]:
    return [w for w in written(svg) if palette.contrast(w.color, w.fill) < LEAST]


def lab(color: str, seen_as: Matrix) -> tuple[float, float, float]:
    """CIELAB of a color, as a person with this vision sees it."""
    linear = [palette._linear(int(color[at : at + 2], 16) / 255) for at in (1, 3, 5)]
    r, g, b = (
        min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear, strict=True))))
        for row in seen_as
    )
    tristimulus = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in tristimulus
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(one: str, other: str, seen_as: Matrix) -> float:
    both = zip(lab(one, seen_as), lab(other, seen_as), strict=True)
    return math.sqrt(sum((a - b) ** 2 for a, b in both))


def test_the_contrast_is_that_of_wcag() -> None:
    assert palette.contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert palette.contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("fill", palette.FILLS)
def test_the_text_of_each_fill_is_readable_on_it(fill: str) -> None:
    assert palette.contrast(palette.text_on(fill), fill) >= LEAST


@pytest.mark.parametrize("color", palette.TEXTS)
@pytest.mark.parametrize("paper", [palette.PAPER, palette.SURFACE, palette.NEUTRAL])
def test_each_color_of_text_is_readable_on_paper(color: str, paper: str) -> None:
    assert palette.contrast(color, paper) >= LEAST


def test_one_color_has_one_meaning() -> None:
    by_color: dict[str, list[str]] = {}
    for name, color in names().items():
        if "_PARALLEL" not in name:  # kinds of parallelism are compared methods
            by_color.setdefault(color, []).append(name)
    assert {c: n for c, n in by_color.items() if len(n) > 1} == {}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_every_text_of_a_picture_is_readable(path: Path) -> None:
    svg = path.read_text(encoding="utf-8")
    assert weak(svg) == []
    used = set(re.findall(r"#[0-9A-Fa-f]{6}", svg))
    assert used <= set(names().values())


def test_a_weak_text_is_found() -> None:
    c = Canvas("weak", 200, 100, title="a title", desc="a description")
    c.text(20, 90, "on paper", color=palette.BACKWARD, anchor="start")
    c.rect(50, 10, 100, 40, fill=palette.WEIGHTS)
    c.text(100, 35, "on a fill")
    c.text(100, 35, "readable", color=palette.text_on(palette.WEIGHTS))
    assert [w.text for w in weak(c.svg())] == ["on paper", "on a fill"]


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_two_meanings_in_a_picture_look_different(path: Path) -> None:
    svg = path.read_text(encoding="utf-8")
    ramp = set(palette.PARTIAL_SUMS)  # one quantity, from light to dark, with numbers
    used = set(re.findall(r'fill="(#[0-9A-F]{6})"', svg)) & (
        set(palette.FILLS) - ramp - {palette.PAPER, palette.SURFACE, palette.LINK_IDLE}
    )
    for one, other in itertools.combinations(sorted(used), 2):
        assert apart(one, other, AS_IT_IS) > APART, (one, other)
        assert apart(one, other, DEUTERANOPIA) > APART / 2, (one, other)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_generators_name_meanings(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert re.findall(r"#[0-9A-Fa-f]{6}\b", source) == []
    hues = {"BLUE", "SKY", "GREEN", "ORANGE", "YELLOW", "RED", "PURPLE", "GREY", "PALE"}
    used = {n.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name)}
    assert used & hues == set()
