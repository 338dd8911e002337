"""Word the reports of `distlab sim` and `distlab scale`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from distlab.cli.screen import command, cut, wrapped
from distlab.sim.net.quantities import time_words

if TYPE_CHECKING:
    from distlab.sim import Network

FORMULAS = {"ring_s": "ring", "tree_s": "tree", "bound_s": "at least"}
HOT = 4  # times the median rank's bytes: then a rank is a hot spot
Row = dict[str, Any]


def report(settings: dict[str, Any], row: Row, net: Network) -> list[tuple[str, str]]:
    """Return the report of one run."""
    n = row["world_size"]
    ranks = "1 rank" if n == 1 else f"{n} ranks"
    asked, given = settings["num_bytes"], row["num_bytes"]
    size = size_words(asked if abs(asked - given) <= asked / 100 else given)
    head = f"{settings['title']}: {ranks}, {size} each"
    lines = [("plain", f"{head}, {row['net']}")]
    if row["fault"]:
        lines.append(("plain", f"  faults     {row['fault']}"))
        for words in row["unstruck"]:
            lines += [("plain", line) for line in wrapped(words, " " * 13, "")]
    if row["outcome"] != "finished":
        why = f"{row['outcome'].upper()}  {row['explanation']}"
        lines += [("fail", line) for line in wrapped(why, "  ")]
    else:
        took = f"{time_words(row['time_s'])} of simulated time"
        lines.append(("plain", f"  time       {took}"))
    formulas = {"reference_s": row.get("reference_s"), **beside(settings, row, net)}
    for name, seconds in formulas.items():
        if seconds is not None:
            lines.append(("plain", f"  {_NAMES[name]:<10} {time_words(seconds)}"))
    if why := why_no_formula(settings, row, net):
        lines.append(("dim", f"  formula    {why}"))
    sent = size_words(row["sent_bytes"])
    lines.append(("plain", f"  messages   {row['messages']:,}, {sent} in all"))
    if row["messages"]:
        lines.append(("plain", f"  busiest    {_busiest(row)}"))
    if row["collectives"]:
        words = f"{row['collectives']} library calls, and we don't count their messages"
        lines.append(("plain", f"  collective {words}"))
    if row["outcome"] == "finished":
        lines.append(_results(row))
    lines += [("dim", cut(f"  [rank 0] {line}")) for line in row["printed"]]
    wall = f"(simulated in {row['simulated_in_s']:.2f} s)"
    return [*lines, ("dim", f"  {wall}")]


def _results(row: Row) -> tuple[str, str]:
    n, wrong = row["world_size"], row["wrong_ranks"]
    if wrong:
        where = "all ranks" if len(wrong) == n else f"{len(wrong)} of {n} ranks"
        return "fail", f"  results    WRONG on {where}: not {row['known']}"
    if row["known"] and row["is_named"]:
        return "pass", f"  results    right on all ranks: {row['known']}"
    if row["known"]:
        return "plain", f"  results    the same on all ranks: {row['known']}"
    words = "the same on all ranks, but we don't know if it's right"
    if row["results"] > 1:
        words = f"{row['results']} different results on {n} ranks"
    return "plain", f"  results    {words}"


def _busiest(row: Row) -> str:
    busiest, median = row["busiest_bytes"], row["median_bytes"]
    words = f"rank {row['busiest_rank']}: {size_words(busiest)} in one direction"
    if median and busiest >= HOT * median:
        times = f"{busiest / median:.0f} times"
        return f"{words}, {times} as much as the median rank, so it's a hot spot"
    return f"{words}, compared with {size_words(median)} on the median rank"


_NAMES = {"reference_s": "reference", **FORMULAS}


def beside(settings: dict[str, Any], row: Row, net: Network) -> dict[str, float | None]:
    """Return known formulas for what the function does, and a lower bound."""
    from distlab.sim import AlphaBeta
    from distlab.sim.plans import closed_forms as forms

    n, num_bytes = row["world_size"], row["num_bytes"]
    found: dict[str, float | None] = dict.fromkeys(FORMULAS)
    if n < 2 or why_no_formula(settings, row, net):
        return found
    assert isinstance(net, AlphaBeta)
    what = _kind_of(settings["functions"][0], row)
    if what == "all_reduce":
        found["ring_s"] = forms.ring_all_reduce_s(n, num_bytes, net)
        found["tree_s"] = forms.tree_all_reduce_s(n, num_bytes, net)
        found["bound_s"] = forms.all_reduce_bound_s(n, num_bytes, net)
    if what in ("all_gather", "reduce_scatter"):
        found["ring_s"] = forms.ring_reduce_scatter_s(n, num_bytes, net)
    if what == "broadcast":
        found["tree_s"] = forms.tree_s(n, num_bytes, net)
        found["bound_s"] = max(forms.latency_bound_s(n, net), net.message_s(num_bytes))
    return found


def why_no_formula(settings: dict[str, Any], row: Row, net: Network) -> str:
    """Say what has a formula, if this run sends something but has none."""
    from distlab.sim import AlphaBeta

    functions = settings["functions"]
    if row["world_size"] < 2:
        return ""
    if len(functions) > 1:
        one = f"{settings['source']['unit']}:{functions[0]}"
        return f"known only for a single function, such as {one}"
    if not _kind_of(functions[0], row):
        kinds = "all_reduce, reduce_scatter, all_gather and broadcast"
        return f"known only for {kinds}"
    if not isinstance(net, AlphaBeta):
        return "known only for equal links, as in ethernet-100g"
    return ""


def _kind_of(function: str, row: Row) -> str:
    """Find out what the function does from its name, or else from its results."""
    from distlab.simulated.results import KINDS, kind_of

    found = [kind for kind, left in KINDS.items() if left == row["known"]]
    return kind_of(function) or "".join(found)


def table(
    settings: dict[str, Any], rows: list[Row], net: Network, name: str
) -> list[tuple[str, str]]:
    """Return a line for each number of ranks, with the network's name as typed."""
    size = size_words(settings["num_bytes"])
    known = [name for name in FORMULAS if any(row[name] is not None for row in rows)]
    why = next(filter(None, (why_no_formula(settings, row, net) for row in rows)), "")
    head = f"{'ranks':>6} {'time':>10} {'messages':>10} {'busiest rank':>13}"
    head += "".join(f" {FORMULAS[name]:>10}" for name in known)
    lines = [("plain", f"{settings['title']}: {size} each, {name}"), ("dim", head)]
    for row in rows:
        ended = row["outcome"] == "finished"
        took = time_words(row["time_s"]) if ended else row["outcome"]
        took = "WRONG" if row["wrong_ranks"] else took
        ended = ended and not row["wrong_ranks"]
        line = f"{row['world_size']:>6} {took:>10} {row['messages']:>10,}"
        line += f" {size_words(row['busiest_bytes']):>13}"
        line += "".join(
            f" {'–' if row[name] is None else time_words(row[name]):>10}"
            for name in known
        )
        lines.append(("plain" if ended else "fail", line))
    stuck = next((row for row in rows if row["outcome"] != "finished"), None)
    wrong = next((row for row in rows if row["wrong_ranks"]), None)
    if stuck:
        lines += [("fail", line) for line in wrapped(stuck["explanation"])]
    elif wrong:
        words = f"on {wrong['world_size']} ranks the result isn't {wrong['known']}"
        lines.append(("fail", words))
    if why:
        lines.append(("dim", f"formulas: {why}"))
    own = size.replace(" ", "")
    look = command(f"sim {settings['name']} -n 64 --size {own} --open")
    lines.append(
        ("dim", f"to see the timeline of one run: {look}")
    )  # to be pasted whole
    return lines


def size_words(num_bytes: float) -> str:
    """1,048,576 → 1 MiB; 12.3 KiB."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    power = min(3, int(math.log(num_bytes, 1024)))
    return f"{num_bytes / 1024**power:.4g} {('KiB', 'MiB', 'GiB')[power - 1]}"
