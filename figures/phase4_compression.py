"""Error feedback on one small gradient; `python -m figures.phase4_compression`."""

from __future__ import annotations

from pathlib import Path

from distlab.trace.palette import CALL, FORWARD, INK, LINK_BUSY, MUTED
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase4_production" / "figures"
GRADIENT, LIMIT, STEPS = 0.4, 1.0, 8


def error_feedback() -> str:
    """Eight steps of one element, with what it owes."""
    c = Canvas(
        "error-feedback",
        760,
        300,
        title="Error feedback: a small gradient waits until it is large enough",
        desc=(
            "Eight columns, one for each step. In each step the element's gradient is "
            "0.4, and only what is above 1.0 is sent. In step 1 the residual is 0.4, "
            "in step 2 it is 0.8. In step 3 it would be 1.2: this is sent, and the "
            "residual is 0 again. The same happens in step 6. A row below: without "
            "error feedback nothing is sent in any step."
        ),
    )
    left, base, high, wide = 130, 190, 110.0, 72
    limit = base - high * LIMIT
    held = 0.0
    for step in range(STEPS):
        x = left + wide * step
        c.rect(x, base - high * held, 44, high * held, fill=CALL)
        top = base - high * (held + GRADIENT)
        c.rect(x, top, 44, high * GRADIENT, fill=FORWARD)
        held += GRADIENT
        is_sent = held > LIMIT
        if is_sent:
            c.text(x + 22, top - 8, f"{held:.1f} is sent", size=12, color=INK)
        c.text(x + 22, base + 18, f"step {step + 1}", size=11.5, color=MUTED)
        c.text(x + 22, base + 62, "0 sent", size=11.5, color=MUTED)
        held = 0.0 if is_sent else held
    end = left + wide * STEPS
    c.line(left - 10, limit, end, limit, color=LINK_BUSY, thick=1.5, dash="4 3")
    c.text(left - 16, limit + 4, "others send 1.0", size=11.5, anchor="end")
    c.text(left - 16, base - 20, "with residual", size=11.5, anchor="end")
    c.text(left - 16, base + 62, "without", size=11.5, anchor="end")
    words = "A column: the residual of the steps before, and on it the gradient, 0.4."
    c.text(left, base + 96, words, size=11.5, color=MUTED, anchor="start")
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"error_feedback.svg": error_feedback()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
