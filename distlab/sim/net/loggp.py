"""LogGP: how long a message keeps the sender, the wire and the receiver busy.

    sender    ├─o─┤├── (S-1)·G ──┤├─g─┤ next message
    wire           ╲ L             ╲ L
    receiver        ╲               ╲├─o─┤ the message is there

The overhead o is work of a processor, at the sender before the first byte leaves, and
at the receiver after the last byte arrives. G, the gap per byte, is the inverse speed
of the wire, and L is the latency of one byte. The gap g is the time that an end needs
between the last byte of one message and the first of the next. A message of S bytes
therefore takes o + (S-1)·G + L + o, and the next one between the same two ranks can
start after max(o, (S-1)·G + g).

Here the overhead delays the message and the next one, but not the rank's computation.

Source: A. Alexandrov, M. Ionescu, K. Schauser, C. Scheiman, "LogGP: Incorporating Long
Messages into the LogP Model" (1995), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from distlab.sim.net.links import PS, Ports, Wires, require_duration


@dataclass(frozen=True, kw_only=True)
class LogGP:
    """Every pair is connected by an equal link with the four parameters of LogGP.

    Raises:
        ValueError: a parameter is negative or infinite.
    """

    latency_s: float = 5e-6  # L
    overhead_s: float = 1e-6  # o
    gap_s: float = 2e-6  # g
    gap_per_byte_s: float = 0.08e-9  # G

    def __post_init__(self) -> None:
        for name in ("latency_s", "overhead_s", "gap_s", "gap_per_byte_s"):
            require_duration(name, getattr(self, name))

    def wires(self, world_size: int) -> Wires:
        """Return the state of a network on which no message is in flight yet."""

        def cost(num_bytes: float) -> tuple[float, float]:
            busy_s = self._busy_s(num_bytes)
            return busy_s * PS, (self.message_s(num_bytes) - busy_s) * PS

        return Ports(cost, world_size)

    def message_s(self, num_bytes: float) -> float:
        """Return the seconds for one message on an empty network."""
        return self.latency_s + 2 * self.overhead_s + self._bytes_s(num_bytes)

    def _busy_s(self, num_bytes: float) -> float:
        return max(self.overhead_s, self._bytes_s(num_bytes) + self.gap_s)

    def _bytes_s(self, num_bytes: float) -> float:
        return max(0.0, num_bytes - 1) * self.gap_per_byte_s
