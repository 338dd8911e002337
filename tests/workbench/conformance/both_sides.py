"""The same programs on simulated ranks and on real processes, side by side.

python -m tests.workbench.conformance.both_sides     prints the table
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distlab.runner import Cluster, Limits, Run
from distlab.sim import AlphaBeta, Faults, run
from tests.workbench.conformance import own_processes as own
from tests.workbench.conformance import services as s

NET = AlphaBeta(alpha_s=1e-4, bytes_per_s=1e9)
LIMITS = Limits(seconds=60)


@dataclass(frozen=True)
class Case:
    """A program, what it runs beside, and what must come out on both sides."""

    program: Callable[..., Any]
    expected: Sequence[Any]
    services: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)  # of the simulated run
    may_die: tuple[int | str, ...] = ()

    @property
    def name(self) -> str:
        return self.program.__name__

    @property
    def world_size(self) -> int:
        return len(self.expected)

    def simulated(self) -> Run:
        return run(
            self.program,
            self.world_size,
            net=NET,
            faults=Faults(**self.faults),
            services=self.services,
        )

    def real(self, cluster: Cluster, backend: str = "tcp") -> Run:
        """What the program asks for in its reports is done to its processes."""

        def obey(_rank: int, order: str) -> None:
            what, _, whom = order.partition(" ")
            getattr(cluster, what)(int(whom) if whom.isdigit() else whom)

        return cluster.run(
            self.program,
            self.world_size,
            limits=LIMITS,
            backend=backend,
            services=self.services,
            may_die=self.may_die,
            on_report=obey,
        )


LATER_S = 0.5  # in virtual time: by then the program waits for it
FAILED = "RuntimeError: rank 0 could not answer: "
WAITS = f"{FAILED}RuntimeError: what serves a call answers at once: it cannot wait"
NO_SUCH = "ValueError: call to {}, but there is only rank 0 … 1"
CASES = [
    Case(s.set_and_get, [["host0", "host1", "host2"]] * 3),
    Case(s.the_last_set_counts, ["000102030405"] * 2),
    Case(s.wait_for_several, ["11", "", ""]),
    Case(s.count_together, [[30, 30, True]] * 3),
    Case(s.one_leader, [[True, True]] * 3),
    Case(s.nobody_sets_it, [["PeerLost store"] * 2] * 2),
    Case(s.no_number_there, ["ValueError: store.add: 'word' holds no integer"]),
    Case(s.ask_rank_zero, [[], ["1", ""], ["2", ""]]),
    Case(s.all_to_all, [[[f"{r}>{p}" for p in range(3)]] for r in range(3)]),
    Case(s.in_order, [[[*range(25)]], [[*range(1, 26)]], [[]]]),
    Case(s.served_later, ["", "firstsecond"]),
    Case(s.not_yet, ["3"] * 3),
    Case(s.given_up, [[], ["PeerLost 0", "1", "1"]]),
    Case(
        s.handler_fails,
        [
            [],
            [
                f"{FAILED}KeyError: 'momentum'",
                WAITS,
                WAITS,
                WAITS,
                f"{FAILED}TypeError: handle gave a str: a reply is bytes, or None",
            ],
        ],
    ),
    Case(
        s.wrong_calls,
        [
            [
                NO_SUCH.format("rank 9"),
                NO_SUCH.format('"nobody"'),
                "TypeError: a message is bytes, not str",
            ]
        ]
        * 2,
    ),
    Case(s.nobody_serves, ["PeerLost 0"] * 2),
    Case(s.large_messages, [True] * 3),
    Case(own.a_service_by_its_name, [["ab"]] * 3, services={"ledger": own.ledger}),
    Case(
        own.a_service_that_ticks,
        [["over", "started,tick"]] * 2,
        services={"lease": own.lease},
    ),
    Case(
        own.restarted_service,
        [["abd"]] * 2,
        services={"ledger": own.ledger},
        faults={"restart": (("ledger", LATER_S, LATER_S + 0.2),)},
        may_die=("ledger",),
    ),
    Case(
        own.restarted_rank,
        [["life 1"], ["x"], ["x"]],
        faults={"restart": ((0, LATER_S, LATER_S + 0.2),)},
        may_die=(0,),
    ),
    Case(
        own.killed_rank,
        [["PeerLost 1", 0], None, ["PeerLost 1", 2]],
        faults={"kill": {1: LATER_S}},
        may_die=(1,),
    ),
    Case(
        own.frozen_rank,
        [["yes"], ["went on"], []],
        faults={"freeze": ((1, LATER_S, 2 * LATER_S),)},
    ),
]


def table(rows: Sequence[tuple[str, list[Any], list[Any], Sequence[Any]]]) -> str:
    """One line for each program: whether its values are those that they must be."""
    width = max(len("program"), *(len(row[0]) for row in rows))
    lines = [f"{'program':{width}}  simulated  real   the same"]
    for name, simulated, real, expected in rows:
        marks = ["yes" if x == list(expected) else "NO" for x in (simulated, real)]
        same = "yes" if simulated == real else "NO"
        lines.append(f"{name:{width}}  {marks[0]:9}  {marks[1]:5}  {same}")
    return "\n".join(lines)


def main() -> int:
    """Run all of them on both sides and print the table."""
    rows = []
    with Cluster() as cluster:
        for case in CASES:
            done = case.simulated(), case.real(cluster)
            rows.append((case.name, done[0].values, done[1].values, case.expected))
    print(table(rows))
    return int(any(not a == b == list(c) for _, a, b, c in rows))


if __name__ == "__main__":
    raise SystemExit(main())
