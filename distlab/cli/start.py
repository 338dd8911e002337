"""`distlab start`: the first 15 minutes, in five screens.

Each screen has one idea, runs something real, and fits into 80 × 24. Two of them first
ask for a prediction. We keep the answer on this machine and never grade it.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import TYPE_CHECKING

from distlab.cli.own_course import own_course
from distlab.cli.prompt import QuitError, ask, offer_editor, say, title
from distlab.cli.screen import command, show, warn
from distlab.curriculum import (
    Curriculum,
    Progress,
    ProgressUnavailableError,
)
from distlab.curriculum.fetched import fetch_here
from distlab.curriculum.path import current_task, passed_tasks
from distlab.grading.preflight import look_at
from distlab.paths import shown

if TYPE_CHECKING:  # these import torch, and the first line should not wait for it
    from distlab.runner import Cluster
    from distlab.training.digits import DigitsResult, Mode

NUM_RANKS = 4
EPOCHS = 10  # enough to read most digits; four ranks take some seconds for it
_NEXT = "Enter: next · q: quit > "


def start(*, only_fetch: bool = False) -> int:
    """Show the five screens; return 11 on failure and 0 even if the learner quits.

    If distlab came in a wheel, and the working folder is empty, it first copies the
    course there.

    Raises:
        CurriculumError: the folder isn't a course, and isn't empty either.
    """
    fetched = fetch_here()
    curriculum = own_course()
    if fetched or only_fetch:
        show([("plain", f"the course is in {shown(curriculum.root)}")])
    if only_fetch:
        return 0
    tour = Tour(curriculum, Progress(curriculum.root))
    try:
        return tour.lead()
    except QuitError:
        return 0


class Tour:
    """The screens of one sitting."""

    def __init__(self, curriculum: Curriculum, progress: Progress) -> None:
        self._curriculum = curriculum
        self._progress = progress
        self._averaged: DigitsResult

    def lead(self) -> int:
        """Show all screens, or only the last one to learners who return."""
        if not self._skips():
            self._your_machine()
            from distlab.ranks import new_cluster
            from distlab.runner import RunnerError
            from distlab.training.digits import PRELOADS

            try:
                with new_cluster(preload=PRELOADS) as cluster:
                    cluster.start(wait=False)  # while they read, it imports torch
                    ask(_NEXT)
                    self._four_processes(cluster)
                    self._four_instead_of_one(cluster)
                    self._without_averaging(cluster)
            except RunnerError as error:
                warn(f"the ranks did not finish: {error}; see `{command('doctor')}`")
                return 11
        return self._first_task()

    def _skips(self) -> bool:
        passed = passed_tasks(self._curriculum, self._progress)
        if not passed:
            return False
        title("welcome back")
        core = [task.id for task in self._curriculum.tasks if not task.stretch]
        done = len(passed.intersection(core))
        say(f"You have passed {done} of {len(core)} tasks.")
        if not self._all_passed():
            task = current_task(self._curriculum, self._progress)
            say(f"You are at {task.number}: {task.title}.")
        say("")
        return (
            ask("Enter: continue there · t: take the tour again · q: quit > ", "t")
            != "t"
        )

    def _all_passed(self) -> bool:
        passed = passed_tasks(self._curriculum, self._progress)
        return passed.issuperset(task.id for task in self._curriculum.tasks)

    # ── 1/5 ─────────────────────────────────────────────────────────────────────────

    def _your_machine(self) -> None:
        from rich.console import Console

        from distlab.cli.doctor import diagnose, render
        from distlab.cli.training import LiveLine

        title("1/5  your machine")
        line = LiveLine()
        line.say("looking at this machine for a few seconds …")
        findings = diagnose()
        line.clear()
        console = Console(highlight=False)
        for finding in findings:
            for row in render(finding):
                console.print(row, no_wrap=True, overflow="ellipsis")
        say("")
        if any(finding.state == "broken" for finding in findings):
            say("Something is missing. You can fix it first, or take the tour anyway.")
        say(
            "Nothing leaves this computer, and you need neither a GPU nor an account.",
            "",
        )

    # ── 2/5 ─────────────────────────────────────────────────────────────────────────

    def _four_processes(self, cluster: Cluster) -> None:
        from distlab.runner import Limits
        from distlab.training.hello import introduce

        program = inspect.getsource(introduce).splitlines()
        again = "r"
        while again == "r":
            title("2/5  four processes, one file")
            show([("dim", f"    {line}") for line in program])
            say("", f"{NUM_RANKS} processes run these lines at the same time:", "")
            cluster.run(
                introduce,
                NUM_RANKS,
                limits=Limits(seconds=60),
                on_report=lambda _, sentence: say(f"    {sentence}"),
            ).require_finished()
            say(
                "",
                "Only the rank differs between them, and no rank is the main process.",
                "They share no memory, so data moves between ranks only in messages.",
                "",
            )
            again = ask(
                "r: run it again (who is first?) · Enter: next · q: quit > ", "r"
            )

    # ── 3/5 ─────────────────────────────────────────────────────────────────────────

    def _four_instead_of_one(self, cluster: Cluster) -> None:
        from distlab.cli.training import kilobytes, table
        from distlab.training.digits import compare

        title("3/5  predict, then run")
        say(
            "A small network learns to read 1,437 handwritten digits. Now 4 processes",
            "run the same training together, and each takes a quarter of every batch.",
            "",
            "Compared with one process, an epoch will take",
            "    a   a quarter of the time     b   the same time     c   longer",
            "",
        )
        self.predict("start.time", "abc")
        one = self._train(cluster, 1, "averaged")
        four = self._averaged = self._train(cluster, NUM_RANKS, "averaged")
        proof = compare(four, one, accuracy_floor=0.0)
        say(
            "", *table([("1 rank", one, None), ("4 ranks", four, proof.difference)]), ""
        )
        ratio = four.epoch_s / one.epoch_s
        share = f"{100 * four.communication:.0f} %"
        say(
            f"{_how_long(ratio)} The ranks spent {share} of that time on messages,",
            f"and each rank sent {kilobytes(four.step_bytes)} per step.",
        )
        if ratio > 1:
            say("The network is so small that there is hardly any work to divide by 4.")
        say("")
        if proof.holds:
            say(
                "Yet the result is the same. All ranks have the same weights and,",
                "apart from rounding, so does one process. Phase 1 explains why.",
                "",
            )
        ask(_NEXT)

    # ── 4/5 ─────────────────────────────────────────────────────────────────────────

    def _without_averaging(self, cluster: Cluster) -> None:
        from distlab.cli.training import accuracy

        title("4/5  predict, then run")
        say(
            "In every step, the 4 ranks average their gradients. Without that line,",
            "each rank would learn only from its own quarter of the batch.",
            "",
            "The accuracy on held-out digits will",
            "    a   drop to guessing (0.1)     b   stay above 0.9",
            "",
        )
        self.predict("start.accuracy", "ab")
        results = {
            "averaged": self._averaged,
            "no communication": self._train(cluster, NUM_RANKS, "alone"),
            "added, not averaged": self._train(cluster, NUM_RANKS, "summed"),
        }
        say("", f"  {'':<21}{'accuracy':<13}weights (digests of ranks 0 to 3)")
        for label, result in results.items():
            short = " ".join(digest[:4] for digest in result.digests)
            differ = "   REPLICAS DIFFER" if len(set(result.digests)) > 1 else ""
            say(f"  {label:<21}{accuracy(result):<13}{short}{differ}")
        added = results["added, not averaged"].weights[0]
        off = float((added - self._averaged.weights[0]).abs().max())
        found = [value for result in results.values() for value in result.accuracies]
        spread = max(found) - min(found)
        say(
            "",
            "The accuracy doesn't show the mistake, because the best and the worst run",
            f"differ by only {spread:.3f}. The weights do show it. Without messages,",
            f"you get 4 different models. With sums, one weight is off by {off:.2f}.",
            "That's why this course never grades you by accuracy.",
            "",
        )
        ask(_NEXT)

    # ── 5/5 ─────────────────────────────────────────────────────────────────────────

    def _first_task(self) -> int:
        if self._all_passed():
            say("You have passed all the tasks.")
            return 0
        task = current_task(self._curriculum, self._progress)
        verdict, _ = look_at(self._curriculum, task, "mine")
        guide = self._curriculum.units[task.unit].guide(self._curriculum.root)
        where = "your first task" if task.number == "1.1" else "your next task"
        title(f"5/5  {where}: {task.number} {task.id} · about {task.minutes} min")
        say(f"{task.title}:")
        for name, text in task.clauses.items():
            head = f"  {name}  "
            say(
                *textwrap.wrap(text, 80, initial_indent=head, subsequent_indent=" " * 6)
            )
        say("")
        say(
            f"Write it here:  {verdict.place}",
            f"What and why:   {shown(guide)}",
            "",
        )
        offer_editor(verdict.path, verdict.line)
        say(
            "Leave this terminal to `distlab watch` and edit in another window.",
            "Whenever you save, it shows which clauses hold and which don't yet.",
            "",
        )
        ask("Enter: watch my file · q: quit > ")
        from distlab.cli.watch import watch

        return watch()

    # ── what several screens need ───────────────────────────────────────────────────

    def predict(self, question: str, letters: str) -> None:
        """Ask for a prediction and keep it; it is never graded."""
        answer = ask(f"{', '.join(letters)} > ", letters, enter=False)
        if not answer:
            say("  We'll continue without a prediction.")
            return
        try:
            self._progress.record_prediction(question, answer)
        except ProgressUnavailableError as error:
            show([("dim", f"  ({error})")])

    def _train(self, cluster: Cluster, world_size: int, mode: Mode) -> DigitsResult:
        from distlab.cli.training import LiveLine
        from distlab.training.digits import DigitsConfig, train_on_ranks

        config = DigitsConfig(world_size=world_size, epochs=EPOCHS, mode=mode)
        line = LiveLine(EPOCHS, quiet=not sys.stdout.isatty())
        line.say(f"  {world_size} rank{'s' * (world_size > 1)}: starting …")
        try:
            return train_on_ranks(cluster, config, on_moment=line.show)
        finally:
            line.clear()


def _how_long(ratio: float) -> str:
    from distlab.cli.training import times

    if ratio > 1.25:
        return f"It took {times(ratio)} as long."
    if ratio < 0.8:
        return f"It took only {ratio:.2f} of the time."
    return "It took about the same time."
