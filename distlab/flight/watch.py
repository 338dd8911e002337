"""Read what a job's ranks have posted until one reading proves a hang.

The agent of node 0 watches its ranks from a thread. Under another launcher the first
rank that has not ended does it. Both write the verdict into the store, where the ranks
that stand still find it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from distlab.flight.live import Finding, Post, Quiet, find, holds_back

LOOK_S = 0.1
_LATE_S = 0.5  # for ranks that have yet to arrive at a call on which others disagree
WITHOUT_PROGRESS_S = 60.0
Told = Callable[[Finding | Quiet], None]


class Watch:
    """Looks at the posts of one start of a job.

    `tell` gets the finding, or after `quiet_s` without a call a Quiet. `ends` says
    whether a finding ends the ranks.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        world_size: int,
        tell: Told,
        *,
        ends: bool = True,
        quiet_s: float = WITHOUT_PROGRESS_S,
    ) -> None:
        self._store, self._prefix, self._world_size = store, prefix, world_size
        self._tell, self._ends, self._quiet_s = tell, ends, quiet_s
        self._posts: dict[int, Post] = {}
        self._num_posts = -1
        self._is_told = False
        self._held_back_s: float | None = None  # since when a call is held back
        self._progress: object = None
        self._is_quiet_told = False
        self._progress_s = time.monotonic()

    @property
    def posts(self) -> dict[int, Post]:
        """The newest post of each rank that has posted, as far as we've read them."""
        return self._posts

    def look(self) -> Finding | None:
        """Read the posts if there are new ones; return the hang if they prove one.

        Raises:
            RuntimeError: torch's, if the store is gone.
        """
        if self._is_told:
            return None
        num_posts = self._store.add(f"{self._prefix}posts", 0)
        if num_posts != self._num_posts or self._held_back_s is not None:
            self._num_posts = num_posts
            self._read()
            finding = find(self._posts, self._world_size, is_late=self._is_late())
            if finding is not None:
                self._is_told = True
                try:
                    self._tell(finding)
                finally:  # the ranks end even if the report can't be written
                    self._post(finding)
                return finding
        self._look_for_progress()
        return None

    def _post(self, finding: Finding) -> None:
        """Tell the ranks, which stand still."""
        states = [post["state"] for post in self._posts.values()]
        verdict = {
            "sentence": finding.hang.sentence,
            "ends": self._ends,
            "num_alive": states.count("still"),
        }
        self._store.set(f"{self._prefix}verdict", json.dumps(verdict))

    def _is_late(self) -> bool:
        now_s = time.monotonic()
        if not any(map(holds_back, self._posts.values())):
            self._held_back_s = None
        elif self._held_back_s is None:
            self._held_back_s = now_s
        return self._held_back_s is not None and now_s - self._held_back_s > _LATE_S

    def _read(self) -> None:
        for rank in range(self._world_size):
            key = f"{self._prefix}post/{rank}"
            if self._store.check([key]):
                self._posts[rank] = json.loads(self._store.get(key))

    def _look_for_progress(self) -> None:
        progress = [post["num_events"] for _, post in sorted(self._posts.items())]
        now_s = time.monotonic()
        if progress != self._progress:
            self._progress, self._progress_s = progress, now_s
            self._is_quiet_told = False
        elif self._posts and not self._is_quiet_told:
            seconds = now_s - self._progress_s
            if seconds > self._quiet_s:
                self._is_quiet_told = True
                self._tell(Quiet(seconds, self._posts, self._world_size))
