"""The figures and tables of phase 4's lab: rows of numbers in, a figure out.

`print_table` prints the same numbers. Colors never stand alone: there is a word, a
marker or a hatch beside each.
"""

from __future__ import annotations

import matplotlib.pyplot as plt

from distlab.trace.palette import CALL, FORWARD, SURFACE
from distlab.walkthroughs.phase3_lab import print_table
from distlab.walkthroughs.phase4 import Rows

__all__ = ["draw_shares", "print_table"]

_FILLS = {"data": SURFACE, "compute": FORWARD, "communication": CALL}
_HATCHES = {"data": "", "compute": "", "communication": "///"}


def draw_shares(rows: Rows) -> None:
    """A bar per rank, of the three parts of its step."""
    _, axis = plt.subplots(figsize=(6.5, 0.9 + 0.32 * len(rows)))
    for place, row in enumerate(rows.values()):
        left = 0.0
        for part, percent in row.items():
            axis.barh(
                place,
                percent,
                left=left,
                height=0.7,
                color=_FILLS[part],
                hatch=_HATCHES[part],
                edgecolor="black",
                linewidth=0.6,
                label=part if not place else None,
            )
            left += percent
    axis.set_yticks(range(len(rows)), [f"rank {rank}" for rank in rows])
    axis.invert_yaxis()
    axis.set(xlabel="% of the rank's step", xlim=(0, 100))
    axis.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    plt.show()
