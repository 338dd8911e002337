"""LogGP: who is kept busy by a message, the sender, the wire or the receiver.

    sender    ├─o─┤├── (S-1)·G ──┤├─g─┤ next message
    wire           ╲ L             ╲ L
    receiver        ╲               ╲├─o─┤ the message is there

o, the overhead, is work of a processor: at the sender before the first byte leaves, at
the receiver after the last one came. G, the gap per byte, is the wire's inverse speed.
L, the latency, is the way of one byte. g, the gap, is what an end needs between the
last byte of one message and the first of the next. So one message of S bytes takes
o + (S-1)·G + L + o, and the next one between the same two can start after
max(o, (S-1)·G + g).

Here the overhead delays the message and the next one, not what the rank computes.

Source: A. Alexandrov, M. Ionescu, K. Schauser, C. Scheiman, "LogGP: Incorporating Long
Messages into the LogP Model" (1995), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from distlab.sim.net.links import PS, Ports, Wires, require_duration


@dataclass(frozen=True, kw_only=True)
class LogGP:
    """Every pair is joined alike, by a link with the four parameters of LogGP.

    Raises:
        ValueError: a parameter that is negative or infinite.
    """

    latency_s: float = 5e-6  # L
    overhead_s: float = 1e-6  # o
    gap_s: float = 2e-6  # g
    gap_per_byte_s: float = 0.08e-9  # G

    def __post_init__(self) -> None:
        for name in ("latency_s", "overhead_s", "gap_s", "gap_per_byte_s"):
            require_duration(name, getattr(self, name))

    def wires(self, world_size: int) -> Wires:
        """A network on which nothing is under way yet."""

        def cost(num_bytes: float) -> tuple[float, float]:
            busy_s = self._busy_s(num_bytes)
            return busy_s * PS, (self.message_s(num_bytes) - busy_s) * PS

        return Ports(cost, world_size)

    def message_s(self, num_bytes: float) -> float:
        """Seconds for one message on an empty network."""
        return self.latency_s + 2 * self.overhead_s + self._bytes_s(num_bytes)

    def _busy_s(self, num_bytes: float) -> float:
        return max(self.overhead_s, self._bytes_s(num_bytes) + self.gap_s)

    def _bytes_s(self, num_bytes: float) -> float:
        return max(0.0, num_bytes - 1) * self.gap_per_byte_s
