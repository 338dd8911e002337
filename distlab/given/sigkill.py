"""The signal that ends a process at once, where launchers and their decisions name it.

Windows doesn't have it, but a decision to send it can be judged there all the same.
"""

from __future__ import annotations

import signal

SIGKILL: int = getattr(signal, "SIGKILL", 9)
