"""Answer calls in a simulated run, both at ranks and at services with their own nodes.

Endpoint  sends messages like datagrams, which can be lost, arrive twice, or vanish at a
          partition. Only a dead peer answers at once, with "connection closed".
Store     is reliable and kept by a node that isn't a rank: at a partition, a request
          waits until it heals. The node is on rank 0's machine, so it costs rank 0 no
          time.
services  have their own nodes, after the ranks on the network
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from distlab.comm import Handle, PeerLost, Pending, Reacts, Request, ServiceContext
from distlab.comm.services import Answer, Factory, PeerGone, Started, Tick, WakeAt
from distlab.sim.channels import Group
from distlab.sim.clocks import ServiceClock
from distlab.sim.conditions import Conditions
from distlab.sim.disk import DiskCrash
from distlab.sim.faults import STORE, Node, node_words
from distlab.sim.kernel import Flight, GaveUp
from distlab.sim.net.links import PS, picoseconds
from distlab.sim.nodes import Nodes

SERVICE_TAG = -1
"""The tag of messages between the Endpoints of two ranks, in a trace."""
_IDLE_TICKS = 1000  # in a row, when nothing else happens: the run is at its end
_SOONEST_PS = picoseconds(10e-6)  # from now: or else time could stand still

ServiceMessage = tuple[Node, Node, int, int, int]
"""From, to, bytes, and the picoseconds of start and end; one node isn't a rank."""


class Question(Flight):
    """A request to one node, which has a `reply` when it is done."""

    __slots__ = ("op", "peer", "reply")

    def __init__(self, op: str, peer: Node) -> None:
        super().__init__()
        self.op, self.peer = op, peer
        self.reply: Any = None

    def awaited(self) -> tuple[int, ...]:
        """Implement `Flight.awaited`."""
        return (self.peer,) if isinstance(self.peer, int) else ()

    def call(self) -> dict[str, Any]:
        """Implement `Flight.call`."""
        if isinstance(self.peer, int):
            return {"n": 0, "op": self.op, "dst": self.peer}
        name = "" if self.peer == STORE else f" {self.peer}"
        return {"n": 0, "op": self.op + name}


class Services:
    """The part of a run that all ranks share: who answers, and the way of messages."""

    def __init__(
        self,
        world: Group,
        conditions: Conditions | None,
        nodes: Nodes,
        factories: Mapping[str, Factory],
    ) -> None:
        self.world, self.kernel = world, world.kernel
        self.conditions, self.nodes = conditions, nodes
        self.desks: dict[Node, Desk] = {}
        self.early: dict[int, list[Callable[[], None]]] = {}  # before anyone serves
        self.asked: dict[Question, None] = {}  # in the order in which they were
        self.numbers: Counter[int] = Counter()  # of each caller's requests
        self.num_ticks = 0  # that are to come
        self.errors: dict[str, str] = {}  # of services that could not go on
        self.messages: list[ServiceMessage] = []
        self.when_store_crashes: Callable[[], None] = lambda: None
        self.when_torn: Callable[[Node], None] = lambda node: None
        self._factories = factories
        n = len(world.members)
        self._ports: dict[Node, int] = {STORE: 0}
        self._ports.update({name: n + k for k, name in enumerate(factories)})

    def start(self, name: str) -> None:
        """Create a service with its own node, for the first time or again."""
        self.nodes.revive(name)
        clock = ServiceClock(self.kernel)
        context = ServiceContext(disk=self.nodes.disk(name), clock=clock)
        factory = self._factories[name]
        try:
            service = self.kernel.on_behalf_of(None, lambda: factory(context))
            desk = self.desks[name] = Desk(self, name, service.handle)
            if isinstance(service, Reacts):
                desk.reacts = service
        except DiskCrash:
            self.when_torn(name)
        except Exception as error:
            self.fail(name, "start", error)
        else:
            desk.tell(Started())

    def fail(self, name: Node, what: str, error: Exception) -> None:
        """End a service's process, because it raised an error outside of a call."""
        text = f"{type(error).__name__}: {error}"
        self.errors[str(name)] = f"{node_words(name)} could not {what}: {text}"
        self.crash(name)

    def ask(self, rank: int, step: int, question: Question, timeout_s: float) -> Any:
        """Wait for the reply to a request that has been sent.

        Raises:
            PeerLost: the reply doesn't come.
        """
        kernel, started = self.kernel, self.kernel.now_ps
        self.asked[question] = None
        limit_ps = None if timeout_s == math.inf else picoseconds(timeout_s)
        try:
            in_time = kernel.wait(question, limit_ps)
        finally:
            self.asked.pop(question, None)
        if in_time and question.error is None:
            return question.reply
        if in_time and question.error and not isinstance(question.error, GaveUp):
            raise question.error
        waited_s = (kernel.now_ps - started) / PS
        raise PeerLost(rank, step, question.peer, waited_s)

    def crash(self, node: Node) -> None:
        """End a process, so that callers who wait for its answer get none."""
        self.nodes.crash(node)
        self.desks.pop(node, None)
        if isinstance(node, int):
            self.early.pop(node, None)
        if node == STORE:
            self.when_store_crashes()
        for question in list(self.asked):
            if question.peer == node and not question.done:
                self.kernel.end(question, GaveUp())
        if isinstance(node, int):
            self._gone(node)

    def finish(self, rank: int) -> None:
        """Stop serving at a rank whose program has ended."""
        if self.kernel.closing:
            return
        self.desks.pop(rank, None)
        self._gone(rank)

    def _gone(self, rank: int) -> None:
        """Close the connections of a rank."""
        for node, desk in list(self.desks.items()):
            desk.pending.forget(rank)
            if desk.reacts is not None:
                self.nodes.deliver(node, lambda desk=desk: desk.tell(PeerGone(rank)))  # type: ignore[misc]

    def arrive(self, question: Question, request: Request) -> None:
        """Handle a message that has arrived at its peer."""
        peer = question.peer
        if peer in self.nodes.down:
            self.post(peer, request.peer, 0, lambda: end(self, question, GaveUp()))
        elif peer in self.desks:
            self.desks[peer].take(question, request)
        elif isinstance(peer, int):
            waiting = self.early.setdefault(peer, [])
            waiting.append(lambda: self.arrive(question, request))

    def post(
        self,
        src: Node,
        dst: Node,
        num_bytes: int,
        arrive: Callable[[], object],
        *,
        reliable: bool = False,
    ) -> None:
        """Send a message that may be lost or arrive twice, unless it is `reliable`."""
        arrive = self.nodes.connection(dst, arrive)
        if src == dst:
            self.kernel.at(self.kernel.now_ps, arrive)
        else:
            self._set_off(src, dst, num_bytes, arrive, reliable)

    def _set_off(
        self,
        src: Node,
        dst: Node,
        num_bytes: int,
        arrive: Callable[[], object],
        reliable: bool,
    ) -> None:
        conditions, now_ps = self.conditions, self.kernel.now_ps
        if conditions is not None and conditions.is_cut((src, dst), now_ps):
            if reliable:
                heals_ps = conditions.together_ps((src, dst), now_ps)
                again = (src, dst, num_bytes, arrive, reliable)
                self.kernel.at(heals_ps, self._set_off, *again)
            return
        self._travel(src, dst, num_bytes, arrive, reliable)
        if conditions is not None and not reliable and conditions.luck.doubles():
            conditions.num_duplicates += 1
            self._travel(src, dst, num_bytes, arrive, reliable)

    def _travel(
        self,
        src: Node,
        dst: Node,
        num_bytes: int,
        arrive: Callable[[], object],
        reliable: bool,
    ) -> None:
        world, start = self.world, self.kernel.now_ps
        out, into = self._port(src), self._port(dst)
        if out != into:
            self.kernel.depart()  # what has set off before
            start, until = world.wires.message(out, into, num_bytes, start)
        else:
            until = start
        if world.trace is not None:
            if isinstance(src, int) and isinstance(dst, int):
                row = (src, dst, num_bytes, start, until, SERVICE_TAG)
                world.trace.append(row)
            else:
                self.messages.append((src, dst, num_bytes, start, until))
        conditions = self.conditions
        if reliable or conditions is None or not conditions.luck.loses():
            self.kernel.at(until, arrive)

    def _port(self, node: Node) -> int:
        return node if isinstance(node, int) else self._ports[node]


class Desk:
    """The handler at one node, and the requests that wait there."""

    def __init__(self, services: Services, node: Node, handle: Handle) -> None:
        self._services, self._node = services, node
        rank = node if isinstance(node, int) else None
        kernel = services.kernel
        self.pending = Pending(
            lambda peer, message: kernel.on_behalf_of(
                rank, lambda: handle(peer, message)
            )
        )
        self.reacts: Reacts | None = None
        self._questions: dict[tuple[int, int], Question] = {}
        self._wake = self._idle_ticks = 0

    def take(self, question: Question, request: Request) -> None:
        """Handle a message that has arrived."""
        self._questions[request.peer, request.number] = question
        try:
            answers = self.pending.take(request, self._services.kernel.now_s)
        except DiskCrash:  # before it could send anything
            self._services.when_torn(self._node)
        else:
            self._send(answers)

    def tell(self, event: object) -> None:
        """Tell the service about another event, to which it may react."""
        services, reacts = self._services, self.reacts
        if reacts is None or services.desks.get(self._node) is not self:
            return
        kernel = services.kernel
        now_s = kernel.now_s
        try:
            for action in kernel.on_behalf_of(None, lambda: reacts.on(event, now_s)):
                self._do(action)
            answers = self.pending.offer_again(now_s)
        except DiskCrash:
            services.when_torn(self._node)
        except Exception as error:
            services.fail(self._node, f"go on after {event}", error)
        else:
            self._send(answers)

    def _do(self, action: object) -> None:
        if not (isinstance(action, WakeAt) and 0 <= action.at_s < math.inf):
            raise TypeError(
                f"on gave {action!r}: a service can ask for WakeAt(seconds)"
            )
        kernel = self._services.kernel
        self._wake += 1
        self._services.num_ticks += 1
        when_ps = max(kernel.now_ps + _SOONEST_PS, picoseconds(action.at_s))
        kernel.at(when_ps, self._tick, self._wake)

    def _tick(self, wake: int) -> None:
        services = self._services
        services.num_ticks -= 1
        is_idle = services.kernel.is_idle(services.num_ticks)
        self._idle_ticks = self._idle_ticks + 1 if is_idle else 0
        if wake == self._wake and self._idle_ticks <= _IDLE_TICKS:
            services.nodes.deliver(self._node, lambda: self.tell(Tick()))

    def _send(self, answers: list[Answer]) -> None:
        services, node = self._services, self._node
        for answer in answers:
            request, reply, error = answer.request, answer.reply, answer.error
            question = self._questions.pop((request.peer, request.number), None)
            if question is None:
                continue
            if error is not None:
                what = f"{type(error).__name__}: {error}"
                whom = node_words(node)
                error = RuntimeError(f"{whom} could not answer: {what}")
            services.post(
                node,
                request.peer,
                len(reply),
                lambda q=question, e=error, r=reply: end(services, q, e, r),  # type: ignore[misc]
            )


def end(
    services: Services, question: Question, error: Exception | None, reply: Any = None
) -> None:
    """Deliver the reply to a question, for the first time or again."""
    if not question.done:
        question.reply = reply
        services.kernel.end(question, error)
