"""A very small SVG canvas: boxes, lines, arrows, words; the same bytes every time.

Colors are those of `palette`. Arrow heads are drawn, not referenced, so that every
viewer shows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

from distlab.trace.palette import GRID, INK, PAPER, SURFACE, WAITING

SANS = "Verdana, DejaVu Sans, Helvetica, Arial, sans-serif"
MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"


def num(value: float) -> str:
    """Write a coordinate with at most one decimal, never as ``-0``."""
    text = f"{value:.1f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


class Canvas:
    """One picture; every method adds a shape on top of those before it."""

    def __init__(
        self, name: str, width: int, height: int, *, title: str, desc: str
    ) -> None:
        """Start with a light background, so that dark mode does not hide the ink."""
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            f'aria-labelledby="{name}-title {name}-desc" font-family="{SANS}">',
            f'<title id="{name}-title">{escape(title)}</title>',
            f'<desc id="{name}-desc">{escape(desc)}</desc>',
        ]
        self.rect(0.5, 0.5, width - 1, height - 1, fill=PAPER, stroke=GRID)

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *,
        fill: str = "none",
        stroke: str = INK,
        thick: float = 1,
        dash: str = "",
        round_: float = 0,
    ) -> None:
        """Draw a box whose top left corner is (x, y)."""
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        extra += f' rx="{num(round_)}"' if round_ else ""
        self._parts.append(
            f'<rect x="{num(x)}" y="{num(y)}" width="{num(w)}" height="{num(h)}" '
            f'fill="{fill}" stroke="{stroke}" stroke-width="{num(thick)}"{extra}/>'
        )

    def circle(
        self, x: float, y: float, r: float, *, fill: str = "none", stroke: str = INK
    ) -> None:
        """Draw a circle round (x, y)."""
        self._parts.append(
            f'<circle cx="{num(x)}" cy="{num(y)}" r="{num(r)}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="1.5"/>'
        )

    def polygon(
        self, points: list[tuple[float, float]], *, fill: str, stroke: str = "none"
    ) -> None:
        """Fill the shape with these corners."""
        corners = " ".join(f"{num(x)},{num(y)}" for x, y in points)
        self._parts.append(
            f'<polygon points="{corners}" fill="{fill}" stroke="{stroke}"/>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        color: str = INK,
        thick: float = 1.5,
        dash: str = "",
    ) -> None:
        """Draw a straight line."""
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<line x1="{num(x1)}" y1="{num(y1)}" x2="{num(x2)}" y2="{num(y2)}" '
            f'stroke="{color}" stroke-width="{num(thick)}"{extra}/>'
        )

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        color: str = INK,
        thick: float = 2,
        dash: str = "",
    ) -> None:
        """Draw a line with a head at (x2, y2)."""
        length = math.hypot(x2 - x1, y2 - y1)
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        size = 5 + 2 * thick
        bx, by = x2 - ux * size, y2 - uy * size
        self.line(x1, y1, bx, by, color=color, thick=thick, dash=dash)
        side = size * 0.5
        left, right = (bx - uy * side, by + ux * side), (bx + uy * side, by - ux * side)
        self.polygon([(x2, y2), left, right], fill=color)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        color: str = INK,
        anchor: str = "middle",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Write one line whose baseline passes through (x, y)."""
        extra = ' font-weight="bold"' if bold else ""
        extra += f' font-family="{MONO}"' if mono else ""
        self._parts.append(
            f'<text x="{num(x)}" y="{num(y)}" font-size="{num(size)}" fill="{color}" '
            f'text-anchor="{anchor}"{extra}>{escape(words, quote=False)}</text>'
        )

    def hatch(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *,
        color: str = WAITING,
        fill: str = SURFACE,
    ) -> None:
        """Fill a box with slanted lines: waiting, or a wall."""
        self.rect(x, y, w, h, fill=fill, stroke=color)
        step = 6.0
        offset = step
        while offset < w + h:
            x1, y1 = x + max(0.0, offset - h), y + min(h, offset)
            x2, y2 = x + min(w, offset), y + max(0.0, offset - w)
            self.line(x1, y1, x2, y2, color=color, thick=1)
            offset += step

    @contextmanager
    def titled(self, words: str) -> Iterator[None]:
        """Give the shapes drawn meanwhile a title, shown when one points at them."""
        self._parts.append(f"<g><title>{escape(words, quote=False)}</title>")
        yield
        self._parts.append("</g>")

    def svg(self) -> str:
        """Return the finished picture."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"
