"""What a signal that ended a process means, in a few words."""

from __future__ import annotations

import signal

_MEANS = {
    signal.SIGSEGV: "C code read or wrote where it may not",
    signal.SIGBUS: "C code read or wrote where nothing is",
    signal.SIGABRT: "something in it called abort",
    signal.SIGFPE: "C code divided by zero",
    signal.SIGILL: "an instruction that this processor does not have",
}


def name_of_signal(number: int) -> str:
    """`SIGKILL`; of those without a name, such as `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals, all but the first and the last
        return f"signal {number}"


def meaning_of_signal(number: int) -> str:
    """What a crash that this signal reports is; empty for those that are sent."""
    return next((text for known, text in _MEANS.items() if known == number), "")
