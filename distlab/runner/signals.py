"""What a signal that ended a process means, in a few words."""

from __future__ import annotations

import signal

_MEANS = {
    "SIGSEGV": "C code read or wrote where it may not",
    "SIGBUS": "C code read or wrote where nothing is",
    "SIGABRT": "something in it called abort",
    "SIGFPE": "C code divided by zero",
    "SIGILL": "an instruction that this processor does not have",
}


def signal_in(status: int) -> int:
    """Return the signal that ended a process with this status; 0 if none did.

    `os.WTERMSIG` says so too, but Windows lacks it. A status is as waitpid gives it.
    """
    return status & 0x7F if 0 < status & 0x7F < 0x7F else 0


def exit_code_in(status: int) -> int:
    """Return the exit code of a process that no signal ended."""
    return status >> 8 & 0xFF


def name_of_signal(number: int) -> str:
    """`SIGKILL`; of those without a name, such as `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals, all but the first and the last
        return f"signal {number}"


def meaning_of_signal(number: int) -> str:
    """What a crash that this signal reports is; empty for those that are sent."""
    return _MEANS.get(name_of_signal(number), "")
