"""Members under fault scripts: invariants of the reference, and a planted mistake."""

import re
from collections.abc import Iterator
from itertools import chain
from types import ModuleType, SimpleNamespace

import pytest

from distlab import curriculum
from distlab.given.elastic import Form, mosaic
from distlab.grading.checks.elastic.world import (
    HORIZON_S,
    KINDS,
    NODES,
    World,
)
from distlab.sim import Faults, random_script, shrink
from distlab.sim.scripts import faults_of
from distlab.walkthroughs.phase4 import Walkthrough

UNIT = curriculum.load("elastic", "reference")
LOADER = curriculum.load("data_loader", "reference")


def played(script: Faults, unit: ModuleType | SimpleNamespace = UNIT) -> World:
    world = World(script, lambda settings: settings.make(unit))
    world.play()
    return world


def flaws(world: World) -> list[str]:
    """What no script may lead to."""
    found = [*flaws_of_forms(world), *taken_although_ended(world)]
    if world.near.is_open and world.near.membership.is_round:
        found.append("a round without an end")
    return found


def flaws_of_forms(world: World) -> Iterator[str]:
    own = world.settings
    last: dict[int, list[str]] = {}
    for (_, generation, pairs, source, num_steps), steps in world.forms:
        ranks, members = [rank for rank, _ in pairs], [m for _, m in pairs]
        if generation in last:
            yield f"two generations {generation}"
        if ranks != list(range(len(set(members)))):
            yield f"ranks {ranks}"
        if not own.min_members <= len(ranks) <= own.max_members:
            yield f"{len(ranks)} members"
        survivors = [m for m in members if m in last.get(generation - 1, members)]
        if steps[source] != max((steps[m] for m in survivors), default=-1):
            yield f"source {source} of {steps}"
        shard = -(-own.global_batch_size // len(ranks))
        if not 0 <= num_steps * own.microbatch_size - shard < own.microbatch_size:
            yield f"{num_steps} steps of accumulation"
        last[generation] = members


def taken_although_ended(world: World) -> Iterator[str]:
    for agent in world.agents:
        ended: set[str] = set()
        for _, event, actions in agent.rows:
            if event[0] == "lost" and event[2]:
                ended.add(event[1])
            formed = (action for action in actions if action[0] == "form")
            if any(ended & {m for _, m in action[2]} for action in formed):
                yield "a member that has ended"


def script_of(seed: int) -> Faults:
    return random_script(seed, NODES, HORIZON_S, kinds=KINDS)


def expect_invariants(seeds: range) -> None:
    worlds = [played(script_of(seed)) for seed in seeds]
    assert [(w.script, found) for w in worlds for found in flaws(w)] == []
    # Not because nothing happens: second generations, other sides, and refusals.
    actions = [row[2] for w in worlds for agent in w.agents for row in agent.rows]
    kinds = [action[0] for action in chain(*actions)]
    assert kinds.count("refuse") > len(seeds)
    assert sum(len(w.forms) for w in worlds) > 2 * len(seeds)
    assert sum(any(a.formed for a in w.agents[1:]) for w in worlds) > len(seeds) / 40


def test_no_script_breaks_an_invariant() -> None:
    expect_invariants(range(150))


@pytest.mark.slow
def test_no_script_of_a_thousand_breaks_an_invariant() -> None:
    expect_invariants(range(1000))


class NewcomerWins(UNIT.Membership):  # type: ignore[name-defined, misc]
    """The planted mistake: all take the state of the member that joined last."""

    def form(self) -> list[object]:
        newest = list(self.joined)[-1]
        return [
            Form(a.generation, a.members, newest, a.grad_accum_steps)
            if isinstance(a, Form) and newest in a.members.values()
            else a
            for a in super().form()
        ]


def test_a_planted_mistake_is_found_and_its_script_made_short() -> None:
    broken = SimpleNamespace(Membership=NewcomerWins)

    def fails(script: Faults) -> bool:
        return any("source" in flaw for flaw in flaws(played(script, broken)))

    scripts = (script_of(seed) for seed in range(100))
    found = next(s for s in scripts if len(faults_of(s)) > 3 and fails(s))
    short = shrink(found, fails)
    assert fails(short)
    assert 1 <= len(faults_of(short)) <= 3
    assert not fails(Faults(seed=short.seed))


def test_two_agents_cannot_both_go_on_although_both_could() -> None:
    """Without the majority the same scripts give two models."""

    class Both(UNIT.Membership):  # type: ignore[name-defined, misc]
        is_majority = True

    broken = SimpleNamespace(Membership=Both)
    found = [
        flaw for seed in range(40) for flaw in flaws(played(script_of(seed), broken))
    ]
    assert any("two generations" in flaw for flaw in found)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_plan_is_that_of_the_loader_that_resumes(world_size: int) -> None:
    """Where all ranks are equally far, 1.15's state says the same."""
    data = list(range(50))
    loaders = [
        LOADER.DistributedDataLoader(data, 8, rank, world_size, seed=5)
        for rank in range(world_size)
    ]
    order = list(chain(*LOADER.DistributedDataLoader(data, 8, 0, 1, seed=5).batches()))
    history = [[2, 2, 2, 2], [1, 1]]
    rest = [loader.batches()[3:] for loader in loaders]
    assert UNIT.resplit(order, 8, history, world_size) == rest


def test_the_picture_of_an_epoch_has_each_sample_once() -> None:
    cells = [line.split(None, 2)[2] for line in mosaic(UNIT.resplit) if "rank " in line]
    numbers = chain(*(cell.replace("|", " ").split() for cell in cells))
    assert sorted(map(int, numbers)) == list(range(24))


@pytest.mark.slow
def test_an_epoch_on_4_then_2_then_3_processes_is_that_of_a_fixed_run() -> None:
    walk = Walkthrough()
    try:
        run = walk.resized(steps=(8, 8), global_batch_size=60, microbatch_size=10)
    finally:
        walk.close()
    assert [row["ranks"] for row in run.rows().values()] == [4, 2, 3]
    # The member that was ahead; after that all are equally far.
    assert run.generations[1]["source"] == "d"
    assert sorted(chain(*chain(*run.samples))) == list(range(run.num_samples))
    assert {sum(map(len, step)) for step in run.samples[:-1]} == {60}
    assert run.losses == pytest.approx(run.fixed_losses, abs=1e-12)


def test_the_guides_script_of_members_prints_what_the_guide_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    guide = curriculum.load_curriculum().root / "phase4_production/guide/elastic.md"
    text = re.sub("^> ?", "", guide.read_text(encoding="utf-8"), flags=re.MULTILINE)
    script = text.split("```python\n")[1].split("```")[0]
    exec(script.replace('"mine"', '"reference"'), {})
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 3
    assert printed in text
