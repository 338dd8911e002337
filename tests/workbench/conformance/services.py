"""What Store, Endpoint and services must do, as programs that run on both sides.

Each program returns the same values on simulated ranks and on real processes. Nothing
in them knows where it runs: what takes time sleeps on `ctx.clock`, what must come first
is waited for in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab.comm import Endpoint, PeerLost, Store
from distlab.runner import RankContext

PATIENCE_S = 20.0
PAUSE_S = 0.02  # between two tries


def seams(ctx: RankContext) -> tuple[Store, Endpoint]:
    assert ctx.store
    assert ctx.endpoint
    return ctx.store, ctx.endpoint


def meet(ctx: RankContext, place: str) -> None:
    """Everybody has come this far; a barrier that needs the store only."""
    store, _ = seams(ctx)
    store.set(f"{place}/{ctx.rank}", b"")
    store.wait([f"{place}/{rank}" for rank in range(ctx.world_size)])


def what_is_raised(call: Callable[[], object]) -> str:
    try:
        call()
    except PeerLost as error:
        return f"PeerLost {error.peer}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def insist(ctx: RankContext, peer: int | str, message: bytes) -> str:
    """Call until there is an answer."""
    _, endpoint = seams(ctx)
    while True:
        try:
            return endpoint.call(peer, message, PATIENCE_S).decode()
        except PeerLost:
            ctx.clock.sleep(PAUSE_S)


# ── the store ───────────────────────────────────────────────────────────────────────


def set_and_get(ctx: RankContext) -> list[str]:
    store, _ = seams(ctx)
    store.set(f"address{ctx.rank}", b"host%d" % ctx.rank)
    return [store.get(f"address{rank}").decode() for rank in range(ctx.world_size)]


def the_last_set_counts(ctx: RankContext) -> str:
    store, _ = seams(ctx)
    if ctx.rank == 0:
        store.set("key", b"old")
        store.set("key", b"")
        store.set("key", bytes(range(256)))
    meet(ctx, "set")
    return store.get("key").hex()[:12]


def wait_for_several(ctx: RankContext) -> str:
    store, _ = seams(ctx)
    if ctx.rank == 0:
        store.wait(["a", "b"])
        return (store.get("a") + store.get("b")).decode()
    store.set("ab"[ctx.rank % 2], b"1")
    store.set("ab"[1 - ctx.rank % 2], b"1")
    return ""


def count_together(ctx: RankContext) -> list[int]:
    store, _ = seams(ctx)
    for _ in range(10):
        store.add("count", ctx.rank)
    meet(ctx, "counted")
    return [store.add("count", 0), int(store.get("count")), store.add("down", -1) < 0]


def one_leader(ctx: RankContext) -> list[bool]:
    store, _ = seams(ctx)
    mine = b"rank %d" % ctx.rank
    first = store.compare_set("leader", b"", mine)
    again = store.compare_set("leader", b"nobody", mine)
    swapped = store.compare_set("own" + str(ctx.rank), b"", mine)
    return [first == again == store.get("leader"), swapped == mine]


def nobody_sets_it(ctx: RankContext) -> list[str]:
    store, _ = seams(ctx)
    return [
        what_is_raised(lambda: store.get("never", timeout_s=0.05)),
        what_is_raised(lambda: store.wait(["never"], timeout_s=0.0)),
    ]


def no_number_there(ctx: RankContext) -> str:
    store, _ = seams(ctx)
    store.set("word", b"seven")
    return what_is_raised(lambda: store.add("word", 1))


# ── calls between ranks ─────────────────────────────────────────────────────────────


def ask_rank_zero(ctx: RankContext) -> list[str]:
    """Who calls is known by rank; an empty reply is a reply."""
    _, endpoint = seams(ctx)
    if ctx.rank == 0:
        endpoint.serve(lambda peer, message: b"" if not message else b"%d" % peer)
        meet(ctx, "over")
        return []
    replies = [endpoint.call(0, text, PATIENCE_S).decode() for text in (b"who", b"")]
    meet(ctx, "over")
    return replies


def all_to_all(ctx: RankContext) -> list[list[str]]:
    """Everybody serves and calls, himself too."""
    _, endpoint = seams(ctx)
    endpoint.serve(lambda peer, message: b"%d>%d" % (peer, ctx.rank))
    told = [
        endpoint.call(peer, b"?", PATIENCE_S).decode() for peer in range(ctx.world_size)
    ]
    meet(ctx, "over")
    return [told]


def in_order(ctx: RankContext) -> list[list[int]]:
    _, endpoint = seams(ctx)
    seen: list[int] = []

    def handle(peer: int, message: bytes) -> bytes:
        seen.append(int(message))
        return b"%d" % len(seen)

    if ctx.rank == 0:
        endpoint.serve(handle)
        meet(ctx, "over")
        return [seen]
    replies = []
    if ctx.rank == 1:
        replies = [int(endpoint.call(0, b"%d" % k, PATIENCE_S)) for k in range(25)]
    meet(ctx, "over")
    return [replies]


def served_later(ctx: RankContext) -> str:
    """A call waits for the first `serve`; a later one takes its place."""
    store, endpoint = seams(ctx)
    if ctx.rank == 0:
        ctx.clock.sleep(0.05)
        endpoint.serve(lambda peer, message: b"first")
        store.get("answered")
        endpoint.serve(lambda peer, message: b"second")
        store.set("changed", b"")
        meet(ctx, "over")
        return ""
    replies = b""
    if ctx.rank == 1:
        replies = endpoint.call(0, b"?", PATIENCE_S)
        store.set("answered", b"")
        store.get("changed")
        replies += endpoint.call(0, b"?", PATIENCE_S)
    meet(ctx, "over")
    return replies.decode()


def not_yet(ctx: RankContext) -> str:
    """A barrier made of calls: nobody is answered before the last has come."""
    _, endpoint = seams(ctx)
    here: set[int] = set()

    def handle(peer: int, message: bytes) -> bytes | None:
        here.add(peer)
        return b"%d" % len(here) if len(here) == ctx.world_size else None

    if ctx.rank == 0:
        endpoint.serve(handle)
    ctx.clock.sleep(0.01 * ctx.rank)
    count = endpoint.call(0, b"here", PATIENCE_S).decode()
    meet(ctx, "over")
    return count


def given_up(ctx: RankContext) -> list[str]:
    """Who gives up is not answered any more; what he asks next is."""
    _, endpoint = seams(ctx)
    offered: list[bytes] = []

    def handle(peer: int, message: bytes) -> bytes | None:
        offered.append(message)
        return None if message == b"never" else b"%d" % offered.count(b"never")

    if ctx.rank == 0:
        endpoint.serve(handle)
        meet(ctx, "over")
        return []
    told = []
    if ctx.rank == 1:
        told.append(what_is_raised(lambda: endpoint.call(0, b"never", 0.05)))
        ctx.clock.sleep(0.05)
        told.append(endpoint.call(0, b"now", PATIENCE_S).decode())
        told.append(endpoint.call(0, b"now", PATIENCE_S).decode())
    meet(ctx, "over")
    return told


def handler_fails(ctx: RankContext) -> list[str]:
    store, endpoint = seams(ctx)

    def handle(peer: int, message: bytes) -> Any:
        if message == b"wait":
            endpoint.call(0, b"?", PATIENCE_S)
        if message == b"store":
            store.get("x")
        if message == b"comm":
            ctx.comm.barrier()
        if message == b"text":
            return "text"
        raise KeyError(message.decode())

    if ctx.rank == 0:
        endpoint.serve(handle)
        meet(ctx, "over")
        return []
    told = []
    if ctx.rank == 1:
        for message in (b"momentum", b"wait", b"store", b"comm", b"text"):
            ask = lambda m=message: endpoint.call(0, m, PATIENCE_S)  # noqa: E731
            told.append(what_is_raised(ask))
    meet(ctx, "over")
    return told


def wrong_calls(ctx: RankContext) -> list[str]:
    _, endpoint = seams(ctx)
    text: Any = "text"
    return [
        what_is_raised(lambda: endpoint.call(9, b"", 1.0)),
        what_is_raised(lambda: endpoint.call("nobody", b"", 1.0)),
        what_is_raised(lambda: endpoint.call(0, text, 1.0)),
    ]


def nobody_serves(ctx: RankContext) -> str:
    _, endpoint = seams(ctx)
    lost = what_is_raised(lambda: endpoint.call(0, b"?", 0.05))
    meet(ctx, "over")
    return lost


def large_messages(ctx: RankContext) -> int:
    _, endpoint = seams(ctx)
    if ctx.rank == 0:
        endpoint.serve(lambda peer, message: message[::-1])
    size = 1 << 20 if ctx.rank == 1 else 1000
    message = bytes(range(250)) * (size // 250)
    right = endpoint.call(0, message, PATIENCE_S) == message[::-1]
    meet(ctx, "over")
    return right
