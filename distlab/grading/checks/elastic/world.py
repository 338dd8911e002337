"""Members that train, die, freeze and come back: a `Membership` under fault scripts.

No process runs: a script of faults, see `distlab.sim.scripts`, says what becomes of
the nodes 0 … n - 1, in virtual time. On each node a process runs; its name is new when
it starts again. It sends a Join when it starts, when a peer is lost, and when it is
told to regroup.

A partition leaves some nodes without the agent that decides. There a second agent
begins, with a copy of the Membership. Events of a side reach the agent of that side.
When the link is there again, the agent that has formed a generation meanwhile stays.
"""

from __future__ import annotations

import copy
import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distlab.comm.services import Tick, WakeAt
from distlab.given.elastic import Form, Join, Lost, Refuse, Regroup, Stop
from distlab.sim.faults import Faults, Node

Fact = tuple[Any, ...]
"""An event or an action: what it is, and its numbers."""
HORIZON_S = 10.0  # of the faults
END_S = 60.0
NODES = 5
KINDS = ("kill", "restart", "restart", "freeze", "partition", "late", "duplicate")
STEP_S = 0.3
NOTICED_S = 0.6  # until the agent says that a member does not answer
_MOST_EVENTS = 3000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a Membership is made with."""

    min_members: int = 2
    max_members: int = 4
    global_batch_size: int = 12
    microbatch_size: int = 2
    grace_s: float = 5.0
    timeout_s: float = 60.0

    def make(self, unit: Any) -> Any:
        """The learner's Membership."""
        own = {k: v for k, v in vars(self).items() if not k.endswith("members")}
        return unit.Membership(self.min_members, self.max_members, **own)


def settings_of(seed: int) -> Settings:
    """Those of a script: they stay when the script is made shorter."""
    draw = random.Random(f"settings {seed}")
    return Settings(
        min_members=draw.choice((1, 2, 2, 3)),
        max_members=draw.choice((NODES - 1, NODES)),
        global_batch_size=draw.choice((12, 16, 30)),
        microbatch_size=draw.choice((1, 2, 3, 5)),
        grace_s=draw.choice((0.5, 1.5)),
        timeout_s=draw.choice((6.0, 12.0)),
    )


# ── what a Membership is told, and what it says ─────────────────────────────────────


def read_actions(given: Any) -> list[Fact]:
    """Actions as tuples, their kind first."""
    if not isinstance(given, list | tuple):
        return [("unknown", f"{given!r:.60}, expected a list of actions")]
    return [_fact(action) for action in given]


def _fact(action: Any) -> Fact:
    match action:
        case Regroup(members):
            return "regroup", sorted(map(str, members))
        case Form(generation, members, source, steps):
            pairs = sorted(dict(members).items())
            return "form", generation, [list(pair) for pair in pairs], source, steps
        case Refuse(member, reason):
            return "refuse", str(member), str(reason)
        case WakeAt(at_s):
            return "wake", float(at_s)
        case Stop(reason):
            return "stop", str(reason)
    return "unknown", f"{action!r:.60}, expected Regroup, Form, Refuse, WakeAt or Stop"


def event_of(fact: Fact) -> Any:
    """The event of a tuple."""
    kind, *numbers = fact
    return {"join": Join, "lost": Lost, "tick": Tick}[kind](*numbers)


# ── the world ───────────────────────────────────────────────────────────────────────


@dataclass
class Process:
    """A process of a node."""

    name: str
    node: Node
    step: int = 0
    generation: int = 0  # whose rank it was last
    trains: bool = False
    alive: bool = True
    frozen: bool = False
    missed: bool = False  # it was told something while it was frozen


@dataclass
class Agent:
    """A Membership, and what happened to it: rows of time, event, actions."""

    membership: Any
    rows: list[tuple[float, Fact, list[Fact]]] = field(default_factory=list)
    wake_at_s: float = math.inf
    formed: list[Fact] = field(default_factory=list)  # since it is alone
    is_open: bool = True


class World:
    """One script, played to its end; then `agents` have their histories."""

    def __init__(self, script: Faults, make: Callable[[Settings], Any]) -> None:
        self.script, self.settings = script, settings_of(script.seed)
        self.now_s, self._count = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.processes: dict[str, Process] = {}
        self.on_node: dict[Node, Process] = {}
        self.num_started: Counter[Node] = Counter()
        self.near = self.other = Agent(make(self.settings))
        self.agents = [self.near]
        self.far: set[Node] = set()  # nodes of the other agent
        self.cut: set[Node] = set()  # nodes beyond the partition, before it is noticed
        self.forms: list[tuple[Fact, dict[str, int]]] = []  # with all members' steps
        for node in range(NODES):
            self.at(script.late.get(node, 0.01 * node), self._start(node))
        for who, at_s in script.kill.items():
            self.at(at_s, partial(self.kill, who))
        for who, from_s, to_s in script.restart:
            self.at(from_s, partial(self.kill, who))
            self.at(to_s, self._start(who))
        for who, from_s, to_s in script.freeze:
            self.at(from_s, partial(self.freeze, who, to_s))
        for nodes, from_s, to_s in script.partitions:
            self.at(from_s, partial(self.divide, nodes, to_s))

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        """Do this at that time, after what was asked for earlier."""
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do this in so many seconds."""
        self.at(self.now_s + seconds, act)

    def play(self) -> None:
        """All events, in order."""
        for _ in range(_MOST_EVENTS):
            if not self._events or self._events[0][0] > END_S:
                return
            self.now_s, _, act = heapq.heappop(self._events)
            act()

    def draw(self, what: str) -> float:
        """A number of 0 … 1 for a purpose, whatever else happens."""
        return random.Random(f"{self.script.seed} {what} {self.now_s:.6f}").random()

    # processes

    def _start(self, node: Node, step: int = 0) -> Callable[[], None]:
        def start() -> None:
            old = self.on_node.get(node)
            if old is not None and old.alive:
                return
            self.num_started[node] += 1
            count = self.num_started[node]
            name = "abcdefgh"[int(node)] + (str(count) if count > 1 else "")
            process = self.processes[name] = Process(name, node, step)
            self.on_node[node] = process
            self.join(process)

        return start

    def join(self, process: Process) -> None:
        """It waits from now on, and says so; maybe its message comes twice."""
        process.missed = process.frozen
        if not process.alive or process.frozen:
            return
        process.trains = False
        event = "join", process.name, process.step, process.generation
        delay_s = 0.01 + 0.05 * self.draw(process.name)
        self.after(delay_s, lambda: self.tell(process.node, event))
        if self.draw(f"copy of {process.name}") < self.script.duplicate:
            late_s = 0.1 + 4 * self.draw(f"late {process.name}")
            self.after(late_s, lambda: self.tell(process.node, event))

    def kill(self, node: Node) -> None:
        """The process ends; its peers see it, and the agent of its side is told."""
        process = self.on_node.get(node)
        if process is None or not process.alive:
            return
        process.alive = False
        self.after(0.08 * self.draw("ended"), lambda: self._lose(process, ended=True))
        self._fail(process)

    def _fail(self, lost: Process) -> None:
        """Members of the same generation cannot go on without this one."""
        for peer in list(self.processes.values()):
            is_peer = peer is not lost and peer.generation == lost.generation
            if is_peer and peer.trains and lost.trains:
                delay_s = 0.02 + 0.05 * self.draw(f"fail {peer.name}")
                self.after(delay_s, partial(self._rejoin, peer))
        lost.trains = False

    def _rejoin(self, process: Process, generation: int | None = None) -> None:
        if process.trains and generation in (None, process.generation):
            self.join(process)

    def _lose(self, process: Process, ended: bool) -> None:
        self.tell(process.node, ("lost", process.name, ended))

    def freeze(self, node: Node, to_s: float) -> None:
        """Nothing happens there until to_s; an agent notices, if that is long."""
        process = self.on_node.get(node)
        if process is None or not process.alive:
            return
        process.frozen = True

        def notice() -> None:
            if process.frozen and process.alive:
                process.missed = True
                self._lose(process, ended=False)

        def thaw() -> None:
            process.frozen = False
            if process.missed:
                self.join(process)

        self.after(NOTICED_S, notice)
        self.at(to_s, thaw)

    # the network

    def divide(self, nodes: tuple[Any, ...], to_s: float) -> None:
        """These nodes cannot be reached by the others; one partition at a time."""
        if self.cut or len(set(nodes)) >= NODES:
            return
        self.cut = set(nodes)
        cut = self.cut
        self.after(NOTICED_S, lambda: self._notice(cut))
        self.at(to_s, self._unite)

    def _notice(self, cut: set[Node]) -> None:
        if self.cut is not cut:
            return  # the link was there again before anything was noticed
        self.far = set(self.cut)
        self.other = copy.deepcopy(self.near)
        self.other.is_open = self.near.is_open and bool(self.forms)  # see is_majority
        self.agents.append(self.other)
        for agent in (self.near, self.other):
            agent.formed = []
        if self.other.wake_at_s < math.inf:
            self._wake(self.other)
        there = [process for process in self.processes.values() if process.alive]
        for process in there:
            away = [
                p for p in there if (p.node in self.far) != (process.node in self.far)
            ]
            if any(p.trains and p.generation == process.generation for p in away):
                delay_s = 0.05 * self.draw(f"cut {process.name}")
                self.after(delay_s, partial(self._rejoin, process))
            is_far = process.node in self.far
            agent = self.near if is_far else self.other
            self._tell(agent, ("lost", process.name, False))

    def _unite(self) -> None:
        """The link is there again: the agent that went on stays, and all go to it."""
        self.cut = set()
        if not self.far:
            return
        gone = self.other
        if self.other.formed and not self.near.formed:
            self.near, gone = self.other, self.near
        gone.is_open, self.far = False, set()
        newest = max((form[1] for form in self.near.formed), default=None)
        for process in list(self.processes.values()):
            if not process.alive:
                self._tell(self.near, ("lost", process.name, True))
            elif not process.trains or newest not in (None, process.generation):
                self.join(process)

    # the agents

    def _agent(self, node: Node) -> Agent:
        return self.other if node in self.far else self.near

    def tell(self, node: Node, event: Fact) -> None:
        """An event of this node reaches the agent of its side."""
        self._tell(self._agent(node), event)

    def _tell(self, agent: Agent, event: Fact) -> None:
        if not agent.is_open:
            return
        actions = read_actions(agent.membership.on(event_of(event), self.now_s))
        agent.rows.append((self.now_s, event, actions))
        for action in actions:
            self._act(agent, action)

    def _act(self, agent: Agent, action: Fact) -> None:
        match action:
            case ("wake", at_s):
                agent.wake_at_s = max(at_s, self.now_s)
                self._wake(agent)
            case ("regroup", members):
                for name in members:
                    self._regroup(self.processes.get(name))
            case ("refuse", name, _):
                self._refused(self.processes.get(name))
            case ("form", generation, pairs, source, _):
                agent.formed.append(action)
                steps = {p.name: p.step for p in self.processes.values()}
                self.forms.append((action, steps))
                self._formed(generation, [name for _, name in pairs], source)
            case ("stop" | "unknown", _):
                agent.is_open = False

    def _wake(self, agent: Agent) -> None:
        at_s = agent.wake_at_s

        def wake() -> None:
            if agent.wake_at_s == at_s:
                agent.wake_at_s = math.inf
                self._tell(agent, ("tick",))

        self.at(at_s + 0.02 * self.draw("tick"), wake)

    def _regroup(self, process: Process | None) -> None:
        if process is not None and process.trains:
            delay_s = STEP_S * self.draw(f"regroup {process.name}")
            generation = process.generation
            self.after(delay_s, lambda: self._rejoin(process, generation))

    def _refused(self, process: Process | None) -> None:
        """It ends, and its node starts another one, with the state of this one."""
        if process is None or not process.alive or process.trains:
            return
        process.alive = False
        self.after(0.05, lambda: self._lose(process, ended=True))
        if self.num_started[process.node] < 6:
            self.after(2.0, self._start(process.node, process.step))

    def _formed(self, generation: Any, names: list[str], source: str) -> None:
        known = [self.processes[name] for name in names if name in self.processes]
        first = self.processes.get(source)
        for process in known:
            process.generation, process.trains = generation, True
            process.step = first.step if first else process.step
        for process in known:
            if not process.alive:
                self._fail(process)
        self.after(STEP_S, lambda: self._step(generation, known))

    def _step(self, generation: Any, members: list[Process]) -> None:
        """One optimizer step of all members, if all can take part in it."""

        def is_in(process: Process) -> bool:
            return process.trains and process.generation == generation

        if not all(is_in(process) and process.alive for process in members):
            return
        sides = {process.node in self.cut for process in members}
        if len(sides) == 1 and not any(process.frozen for process in members):
            for rank, process in enumerate(members):

                def complete(process: Process = process) -> None:
                    if process.alive and is_in(process):
                        process.step += 1

                self.after(0.01 * rank, complete)
        if self.now_s < END_S:
            self.after(STEP_S, lambda: self._step(generation, members))
