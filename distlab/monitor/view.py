"""Show a folder of records for `distlab top`, as plain lines for any screen.

    one · digits · 3 ranks · epoch 4 of 10 · step 92 · 11.0 s
    last record 0.2 s ago
    loss 1.0052   accuracy 0.8806   4,420 samples/s   lr 0.2   norm 0.41   MFU 0.3%
    straggler: rank 2; the other ranks wait for it   (your 4.2)

    rank   step      loss  step ms  ▒ data █ compute ░ communication
       0     92    1.0049     11.6  ▒████░░░░░░░░░░░░░░░   2%  18%  80%
       2     82    1.0311     12.1  ▒███████████████░░░░   2%  77%  21%  10 behind

If not all ranks fit, those that are suspected or behind come first.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from distlab.monitor.jsonl import Recorded
from distlab.monitor.records import StepRecord
from distlab.monitor.suspected import Suspected

SILENT_S = 5.0  # without a record, then a rank is said to be silent
_BAR = 20
_NAMED = 8  # ranks in a line
_REASON = 4  # lines of why a run did not finish
_DATA, _COMPUTE, _COMMUNICATION = "▒", "█", "░"

Line = tuple[str, str]
"""A style of the screen, and the text in that style."""


def view(
    recorded: Recorded,
    now_s: float,
    *,
    width: int,
    height: int,
    suspected: Suspected | None = None,
) -> list[Line]:
    """Return the newest state as at most `height` lines of `width` columns.

    `now_s` is Unix time, as in the records. If not all ranks fit, the last line counts
    the rest; ranks that are suspected, behind, or slowest to reach a communication come
    first. Without `suspected`, the view doesn't mention suspects.
    """
    newest = {rank: rows[-1] for rank, rows in recorded.records.items() if rows}
    ended = _ended(recorded, width)
    if not newest:
        return [*ended, ("plain", "no rank has written a record yet")]
    named = suspected.ranks if suspected else frozenset()
    head = [*_head(recorded, newest, now_s, width), *ended, *_suspects(suspected)]
    head += [("plain", ""), ("dim", _TITLES)]
    room = max(1, height - len(head) - 2)
    ordered = sorted(
        newest.values(),
        key=lambda r: (r.rank not in named, r.step, r.communication_share),
    )
    ranks = ordered if len(ordered) > room else sorted(ordered, key=lambda r: r.rank)
    most = max(record.step for record in newest.values())
    rows = [_row(one, most, is_named=one.rank in named) for one in ranks[:room]]
    lines = [*head, *rows, *_foot(recorded, newest, len(ranks) - room)]
    return [(style, text[:width]) for style, text in lines[:height]]


def _ended(recorded: Recorded, width: int) -> list[Line]:
    """Return why the run didn't finish, if it has ended that way."""
    return [("fail", text) for text in textwrap.wrap(recorded.autopsy, width)[:_REASON]]


def _suspects(suspected: Suspected | None) -> list[Line]:
    if suspected is None:
        return []
    by, step = f"   ({suspected.whose})", suspected.nan_step
    first = f"in step {step}" if step else "first"
    told = (
        ("straggler", suspected.stragglers, "which the others wait for"),
        ("desynchronized", suspected.desynchronized, "whose weights differ"),
        ("inf or nan", suspected.nan_origin, f"whose gradients had it {first}"),
    )
    lines = [
        ("fail", f"{what}: {_ranks(ranks)}, {why}{by}")
        for what, ranks, why in told
        if ranks
    ]
    lines += [("fail", f"{text}{by}") for text in suspected.sentences]
    return lines or [("dim", f"no rank is suspected{by}")]


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:_NAMED])) + (" …" if len(ranks) > _NAMED else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


_TITLES = (
    f"rank   step      loss  step ms  {_DATA} data {_COMPUTE} compute "
    f"{_COMMUNICATION} communication"
)


def _head(
    recorded: Recorded, newest: dict[int, StepRecord], now_s: float, width: int
) -> list[Line]:
    run, records = recorded.run, newest.values()
    first = min(rows[0].time_s for rows in recorded.records.values() if rows)
    last = max(record.time_s for record in records)
    figures: dict[str, float] = {}
    for row in recorded.figures:
        figures |= row
    restarts = figures.get("restarts", run.get("restarts", 0))
    title = " · ".join(
        [
            *(str(run[name]) for name in ("job", "dataset") if run.get(name)),
            f"{run['world_size']} rank{'s' * (run['world_size'] != 1)}",
            f"epoch {max(r.epoch for r in records)} of {run.get('epochs', '?')}",
            f"step {max(r.step for r in records)}",
            duration(last - first),
            *([f"restarts {restarts:.0f}"] if restarts else []),
        ]
    )
    ago = max(0.0, now_s - last)
    news = ("dim" if ago < SILENT_S else "fail", f"last record {duration(ago)} ago")
    if recorded.ended_s is not None:
        past = duration(max(0.0, now_s - recorded.ended_s))
        news = ("dim", f"the run ended {past} ago")
    return [
        ("head", title),
        news,
        *(("plain", line) for line in _filled(_figures(figures), width)),
    ]


def _filled(texts: Sequence[str], width: int) -> list[str]:
    """Arrange the texts side by side, on as many lines as they need."""
    lines = list(texts[:1]) or [""]
    for text in texts[1:]:
        if len(lines[-1]) + len(text) + 3 <= width:
            lines[-1] += f"   {text}"
        else:
            lines.append(text)
    return lines


def _figures(figures: dict[str, float]) -> list[str]:
    shown = (
        ("loss", "loss {:.4f}"),
        ("validation_accuracy", "accuracy {:.4f}"),
        ("throughput", "{:,.0f} samples/s"),
        ("learning_rate", "lr {:.3g}"),
        ("grad_norm", "norm {:.3g}"),
        ("mfu", "MFU {:.1%}"),
        ("gpu_utilization", "GPU {:.0%}"),
    )
    return [text.format(figures[name]) for name, text in shown if name in figures]


def _row(record: StepRecord, most: int, *, is_named: bool) -> Line:
    shares = (
        record.data_wait_share,
        record.compute_share,
        record.communication_share,
    )
    loss = "–" if record.loss is None else f"{record.loss:.4f}"
    text = f"{record.rank:>4}{record.step:>7}{loss:>10}{record.step_s * 1e3:>9.1f}  "
    text += bar(shares) + "".join(f"{share:>5.0%}" for share in shares)
    behind = most - record.step
    if behind:
        return "fail", f"{text}  {behind:,} behind"
    return "fail" if is_named else "plain", text


def bar(shares: Sequence[float], width: int = _BAR) -> str:
    """Draw data, compute and communication as parts of a bar of `width` columns."""
    ends = [round(sum(shares[: i + 1]) / (sum(shares) or 1) * width) for i in range(3)]
    data, compute, _ = ends
    return (
        _DATA * data + _COMPUTE * (compute - data) + _COMMUNICATION * (width - compute)
    )


def _foot(
    recorded: Recorded, newest: dict[int, StepRecord], left_out: int
) -> list[Line]:
    lines: list[Line] = []
    if left_out > 0:
        lines.append(("dim", f"… and {left_out} more ranks"))
    silent = sorted(set(range(recorded.run["world_size"])) - set(newest))
    if silent:
        lines.append(("fail", f"no record yet from {_ranks(silent)}"))
    return lines


def duration(seconds: float) -> str:
    """Return seconds as a person would say them: 4.2 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
