"""The colors of all pictures: one color has one meaning, in SVG and in notebooks.

What a training step computes and keeps has the colors of Okabe and Ito, which people
with the common kinds of color blindness can tell apart. Ranks have the light colors of
Paul Tol, compared methods his muted ones, and all communication is indigo. A color is
never alone: a word, a shape or a pattern says the same.

`FILLS` names the color of text on each fill: one whose contrast with it is at least 4.5
(WCAG 2, level AA).
"""

from __future__ import annotations

PAPER = "#FBFBF8"  # the background of a picture
SURFACE = "#FFFFFF"  # the inside of a frame
NEUTRAL = "#E8E8E8"  # a fill that means nothing more than the word in it
INK = "#111111"  # text, outlines, axes
MUTED = "#5A5A5A"  # secondary text, thin lines
GRID = "#D5D5D0"  # the grid of a diagram, the border of a picture

FORWARD = "#56B4E9"
BACKWARD = "#E69F00"
WEIGHTS = "#0072B2"
GRADIENTS = "#F0E442"
OPTIMIZER_STATE = "#CC79A7"
ACTIVATIONS = "#90D6BF"

RANK_COLORS = (
    "#77AADD",
    "#EEDD88",
    "#FFAABB",
    "#A4B62A",
    "#99DDFF",
    "#EE8866",
)
"""One color per rank, or per local rank."""

LINK_BUSY = "#332288"  # a message; a link that carries bytes
RECEIVING = "#9C92D6"  # the receiving end, beside LINK_BUSY for the sending end
CALL = "#CFCBE8"  # a rank is inside a communication call
LINK_IDLE = "#F1F1EE"
WAITING = "#8A8A8A"  # the hatch of a rank that waits, and of a wall
FAILURE = "#D55E00"
FAILURE_TEXT = "#A84300"
COMPLETE = "#009E73"  # the result: all values are in it; correct
COMPLETE_TEXT = "#006B4E"
PARTIAL_SUMS = ("#EAF5E1", "#BFE3B4", "#7CC98F")  # of one, two, three ranks' values
HIGHLIGHT = "#AA3377"  # what the picture is about: a bottleneck, a rounded number

METHODS = ("#882255", "#117733", "#CC6677", "#8A8A1F")
"""Methods, algorithms or runs that are compared; each curve has its label."""
DATA_PARALLEL, TENSOR_PARALLEL, PIPELINE_PARALLEL = METHODS[:3]
ALGORITHMS = {
    "naive": METHODS[0],
    "ring": METHODS[1],
    "recursive doubling": METHODS[2],
    "hierarchical": METHODS[3],
}

_WITH_INK = (
    *(PAPER, SURFACE, NEUTRAL, LINK_IDLE, WAITING, CALL, RECEIVING),
    *(FORWARD, BACKWARD, GRADIENTS, OPTIMIZER_STATE, ACTIVATIONS),
    *(FAILURE, COMPLETE),
    *(*RANK_COLORS, *PARTIAL_SUMS, *METHODS[2:]),
)
_WITH_WHITE = (WEIGHTS, LINK_BUSY, HIGHLIGHT, *METHODS[:2])
FILLS = dict.fromkeys(_WITH_INK, INK) | dict.fromkeys(_WITH_WHITE, SURFACE)
"""The color of text on each color."""


def text_on(fill: str) -> str:
    """The color of text on `fill`."""
    return FILLS[fill]
