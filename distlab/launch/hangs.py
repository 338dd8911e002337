"""`--explain-hangs`: the agent of node 0 watches what all ranks wait for.

    ranks ── posts ──▶ the store at MASTER_PORT ──▶ a thread of node 0's agent
    ranks ◀── verdict ── the same store

A rank that reads a verdict ends with exit code 1, unless `--on-hang report` says that
the ranks stay as they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from distlab.launch.config import LaunchConfig
from distlab.recorder.agreement import remove
from distlab.recorder.attach import variables
from distlab.recorder.recorder import prefix

if TYPE_CHECKING:
    from distlab.flight.live import Finding
    from distlab.flight.watch import Watch

_PATIENCE = timedelta(seconds=10)


class Hangs:
    """Watches one start of a job after the other. `finding` is the newest's verdict."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self.finding: Finding | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables with which a rank posts."""
        return variables(inherited)

    def begin(self, port: int, world_size: int, generation: int) -> None:
        """Watch the ranks that are about to start."""
        self.close()
        self._is_over = threading.Event()
        self.finding = None
        where = self._config.master_addr, port
        arguments = (where, world_size, generation, self._is_over)
        self._thread = threading.Thread(target=self._watch, args=arguments, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(
        self,
        where: tuple[str, int],
        world_size: int,
        generation: int,
        is_over: threading.Event,
    ) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from distlab.flight.watch import LOOK_S

        keys = prefix(generation - 1)
        with contextlib.suppress(RuntimeError):  # the store's, when the job is over
            store = TCPStore(*where, None, False, _PATIENCE, wait_for_workers=False)
            watch = watch_for(self._config, store, keys, world_size)
            while not is_over.wait(LOOK_S):
                self.finding = watch.look() or self.finding
            remove(store, f"{keys}shared/0")  # of ranks that ended while they met


def watch_for(config: LaunchConfig, store: Any, keys: str, world_size: int) -> Watch:
    """Make the watch that these settings ask for; `keys` is the store's prefix."""
    from distlab.flight.told import tell_on_stderr
    from distlab.flight.watch import Watch

    return Watch(
        store,
        keys,
        world_size,
        tell_on_stderr(config.hang_report, with_stacks=config.hang_stacks),
        ends=config.on_hang != "report",
        quiet_s=config.no_progress,
    )
