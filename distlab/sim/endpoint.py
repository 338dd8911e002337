"""The Endpoint of a simulated rank."""

from __future__ import annotations

from distlab.comm import Handle, Request
from distlab.sim.faults import Node
from distlab.sim.services import Desk, Question, Services


class SimEndpoint:
    """One rank's end of the calls between ranks."""

    def __init__(self, services: Services, rank: int, names: tuple[str, ...]) -> None:
        self._services, self._rank, self._names = services, rank, names
        self._step = 0

    def serve(self, handle: Handle) -> None:
        """Implement `Endpoint.serve`."""
        services = self._services
        services.kernel.enter()
        services.desks[self._rank] = Desk(services, self._rank, handle)
        for arrive in services.early.pop(self._rank, ()):
            services.kernel.at(services.kernel.now_ps, arrive)

    def call(self, peer: Node, message: bytes, timeout_s: float) -> bytes:
        """Implement `Endpoint.call`.

        Raises:
            ValueError: there is no such rank or service.
            TypeError: the message isn't bytes.
        """
        services, rank = self._services, self._rank
        self._require_peer(peer)
        if not isinstance(message, bytes):
            raise TypeError(f"a message is bytes, not {type(message).__name__}")
        services.kernel.enter()
        self._step += 1
        services.numbers[rank] += 1  # goes on when the rank starts again
        request = Request(
            peer=rank,
            number=services.numbers[rank],
            message=message,
            until_s=services.kernel.now_s + timeout_s,
        )
        question = Question("call", peer)
        services.post(
            rank, peer, len(message), lambda: services.arrive(question, request)
        )
        reply: bytes = services.ask(rank, self._step, question, timeout_s)
        return reply

    def _require_peer(self, peer: Node) -> None:
        n, names = len(self._services.world.members), self._names
        if isinstance(peer, str) and peer in names:
            return
        if not isinstance(peer, int) or not 0 <= peer < n:
            whom = f'"{peer}"' if isinstance(peer, str) else f"rank {peer}"
            also = f" and {', '.join(names)}" if names else ""
            raise ValueError(
                f"call to {whom}, but there is only rank 0 … {n - 1}{also}"
            )
