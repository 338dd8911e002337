"""Say in a few words how a verdict differs from the previous one."""

from __future__ import annotations

from distlab.grading import TaskVerdict


class Changes:
    """Remembers the last verdict on each task, and which clauses passed before."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, tuple[str, str]]] = {}
        self._ever: set[tuple[str, str]] = set()

    def since_last(self, verdict: TaskVerdict) -> str:
        """Return `C1 passes again, C2 does not yet`, or "" if nothing has changed.

        If we couldn't run the file, its verdict says nothing about the clauses.
        """
        if not verdict.ran:
            return ""
        now = {clause.id: (clause.status, clause.slug) for clause in verdict.clauses}
        before = self._last.get(verdict.id, {})
        self._last[verdict.id] = dict(now)
        words = {
            clause: text
            for clause, (status, slug) in now.items()
            if (text := self._one(verdict.id, clause, status, slug, before))
        }
        passing = {clause for clause, (status, _) in now.items() if status == "pass"}
        self._ever |= {(verdict.id, clause) for clause in passing}
        if passing & words.keys():
            for clause, (status, _) in now.items():
                if status == "fail" and clause not in words:
                    words[clause] = f"{clause} does not yet"
        return ", ".join(words.values())

    def failing(self, task: str) -> str:
        """Return the first clause that failed in `task`'s last verdict, if any."""
        last = self._last.get(task, {})
        return next((c for c, (status, _) in last.items() if status == "fail"), "")

    def _one(
        self,
        task: str,
        clause: str,
        status: str,
        slug: str,
        before: dict[str, tuple[str, str]],
    ) -> str:
        if clause not in before:
            return ""
        was, old_slug = before[clause]
        if status == "pass" and was != "pass":
            again = (task, clause) in self._ever
            return f"{clause} passes again" if again else f"{clause} now passes"
        if status == "fail" and was == "pass":
            return f"{clause} no longer passes"
        if status == was == "fail" and slug != old_slug and old_slug:
            return f"{clause} is not {old_slug} any more"
        return ""
