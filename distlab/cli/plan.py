"""`distlab plan`: rank the layouts of a model on a cluster."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distlab.cli.screen import show, show_json, waiting, wrapped
from distlab.cli.trace import open_page
from distlab.curriculum import Progress, load_curriculum
from distlab.given.planning import Batch
from distlab.grading.verdict import FAILED, PASS
from distlab.paths import shown
from distlab.plan.catalog import Entry, find_cluster, find_model
from distlab.plan.claims import Figures, holds, require_judgeable
from distlab.plan.plans import (
    DAY_S,
    Fixed,
    Plan,
    Question,
    Ranking,
    goodput_of,
    parse_fixed,
    problem_of,
    ranked,
    recovery_of,
    shares_of,
)
from distlab.plan.played import require_room
from distlab.sim.net.quantities import num_bytes, time_words

if TYPE_CHECKING:
    from distlab.given.planning import Cluster, Model

STEP_TOKENS = 4 << 20  # of a step, unless --global-batch says otherwise
SEQUENCE = 4096  # of a model that doesn't say what it was trained with
MAX_GPUS = 32_768
_LARGE = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "": 1.0}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kMBT]?)")
Lines = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The user's question, with the names in it, and the tokens to train on."""

    model: Entry[Model]
    cluster: Entry[Cluster]
    question: Question
    fixed: Fixed
    tokens: float | None

    @property
    def price(self) -> float:
        """Dollars for a GPU per hour; 0 if we don't know them."""
        return self.question.cluster.price_per_gpu_hour


def plan(
    model: str,
    *,
    num_gpus: int,
    cluster: str = "dgx-h100",
    sequence: int | None = None,
    global_batch: int | None = None,
    max_memory: str = "",
    layout: str = "",
    tokens: str = "",
    price: float = 0.0,
    rows: int = 8,
    why: bool = False,
    claims: list[str] | None = None,
    simulate: bool = False,
    html: str = "",
    open_it: bool = False,
    code: str = "reference",
    as_json: bool = False,
) -> int:
    """Show the fastest layouts; return 1 if none fits, or a claim is false.

    With `simulate`, also run the fastest one in the simulator.

    Raises:
        ValueError: a name, a number or a claim is unknown or wrong.
        CurriculumError, SourceError: the formulas can't be read.
    """
    from distlab.plan.formulas import formulas

    claims = claims or []
    request = _request(
        model,
        cluster,
        num_gpus,
        sequence,
        global_batch,
        max_memory,
        layout,
        tokens,
        price,
    )
    for claim in claims:
        require_judgeable(claim, tokens=bool(tokens), price=request.price > 0)
    if simulate:
        require_room(num_gpus)
    unit = formulas(code)
    with waiting(f"comparing layouts of {num_gpus:,} GPUs", quiet=as_json):
        ranking = ranked(unit, request.question, request.fixed)
    best = ranking.plans[0] if ranking.plans else None
    figures = figures_of(request, best) if best else {}
    judged = {claim: holds(claim, figures) for claim in claims}
    simulated = None
    if simulate and best:
        with waiting(f"simulating {num_gpus:,} ranks", quiet=as_json):
            simulated = _simulated(unit, request, best, html)
    if as_json:
        data = _as_data(unit, request, ranking, figures, judged, rows)
        show_json({**data, "sim": simulated})
    else:
        show(_head(unit, request, ranking))
        if best:
            show(_table(ranking, rows))
            show(_best(unit, request, best, figures))
            if simulated:
                show(_beside(simulated))
            if why:
                show(_why(unit, request, best))
        else:
            show(_nothing_fits(request, ranking))
        show(_verdicts(judged))
    if simulated and open_it:
        open_page(Path(simulated["html"]))
    is_well = best is not None and all(judged.values())
    return PASS if is_well else FAILED


def _request(
    model: str,
    cluster: str,
    num_gpus: int,
    sequence: int | None,
    global_batch: int | None,
    max_memory: str,
    layout: str,
    tokens: str,
    price: float,
) -> Request:
    if not model:
        raise ValueError("name a model, such as llama-70b, or pass a TOML file")
    if not 1 <= num_gpus <= MAX_GPUS:
        raise ValueError(f"--gpus is {num_gpus}: choose between 1 and {MAX_GPUS:,}")
    if sequence is not None and sequence < 1:
        raise ValueError(f"--seq is {sequence}, but it must be above 0")
    if global_batch is not None and global_batch < 1:
        raise ValueError(f"--global-batch is {global_batch}, but it must be above 0")
    known, place = find_model(model), find_cluster(cluster)
    length = sequence or known.sequence or SEQUENCE
    batch = Batch(
        sequence=length,
        global_batch=global_batch or max(1, STEP_TOKENS // length),
    )
    machines = place.value
    if max_memory.isdigit():
        raise ValueError(f"--max-memory is {max_memory}: give it a unit, as in 70GB")
    if max_memory:
        machines = replace(machines, memory_bytes=float(num_bytes(max_memory)))
    if price:
        machines = replace(machines, price_per_gpu_hour=price)
    per_node = machines.gpus_per_node
    if num_gpus > per_node and num_gpus % per_node:
        raise ValueError(
            f"--gpus is {num_gpus}, but nodes of {place.name} have {per_node} GPUs: "
            f"choose a multiple of {per_node}"
        )
    question = Question(
        model=known.value, batch=batch, cluster=machines, num_gpus=num_gpus
    )
    return Request(
        model=known,
        cluster=place,
        question=question,
        fixed=parse_fixed(layout),
        tokens=count(tokens) if tokens else None,
    )


def count(text: str) -> float:
    """Read a number of tokens: `15T` → 1.5e13.

    Raises:
        ValueError: it isn't one.
    """
    found = _COUNT.fullmatch(text.strip().replace(",", ""))
    if not found or not float(found[1]):
        raise ValueError(f'--tokens is "{text}", but it must look like 300B or 15T')
    return float(found[1]) * _LARGE[found[2]]


def figures_of(request: Request, best: Plan) -> Figures:
    """Return what can be asserted about a plan, and what --json shows."""
    question, step_s = request.question, best.time.total_s
    batch_tokens = question.batch.tokens
    hours = price = days = None
    if request.tokens:
        days = request.tokens / batch_tokens * step_s / DAY_S
        hours = days * 24 * question.num_gpus
        price = hours * request.price if request.price else None
    return {
        "mfu": best.mfu,
        "step_s": step_s,
        "memory_gb": best.memory.total_bytes / 1e9,
        "exposed": best.exposed_s / step_s,
        "bubble": best.time.bubble_s / step_s,
        "tokens_per_s": batch_tokens / step_s,
        "days": days,
        "gpu_hours": hours,
        "price": price,
    }


# ── the report ──────────────────────────────────────────────────────────────────────


def _head(unit: ModuleType, request: Request, ranking: Ranking) -> Lines:
    question = request.question
    batch = question.batch
    size = unit.model_size(question.model, batch.sequence)
    gpus = "1 GPU" if question.num_gpus == 1 else f"{question.num_gpus:,} GPUs"
    lines = [
        ("plain", f"{request.model.name} on {gpus} of {request.cluster.name}"),
        _line(
            "model",
            f"{large(size.parameters)} parameters, {large(size.flops_per_token)} FLOP "
            "per token",
        ),
        _line(
            "batch",
            f"{batch.global_batch:,} sequences of {batch.sequence:,} tokens, "
            f"{large(batch.tokens)} tokens in all",
        ),
    ]
    if ranking.plans:
        shapes = len(ranking.plans)
        lines.append(
            _line(
                "layouts",
                f"{ranking.num_fitting:,} of {ranking.num_valid:,} fit in "
                f"{gb(question.cluster.memory_bytes)}, in {shapes:,} "
                f"{'shape' if shapes == 1 else 'shapes'}",
            )
        )
    return lines


def _line(name: str, words: str) -> tuple[str, str]:
    return "plain", f"  {name:<9} {words}"


def _table(ranking: Ranking, rows: int) -> Lines:
    head = (
        f"  {'data':>4} {'tensor':>7} {'pipeline':>8} {'context':>7} {'ZeRO':>4} "
        f"{'micro':>5} {'recompute':<9} {'step':>8} {'memory':>7} {'MFU':>4} "
        f"{'waits':>5}"
    )
    lines: Lines = [("dim", head)]
    for number, one in enumerate(ranking.plans[: max(1, rows)]):
        layout = one.layout
        tensor = f"{layout.tensor}{'+seq' if layout.sequence_parallel else ''}"
        stages = f"{layout.pipeline}"
        if layout.chunks > 1:
            stages += f"×{layout.chunks}"
        text = (
            f"  {layout.data:>4} {tensor:>7} {stages:>8} {layout.context:>7} "
            f"{layout.zero_stage:>4} {layout.microbatch:>5} {layout.recompute:<9} "
            f"{time_words(one.time.total_s):>8} {gb(one.memory.total_bytes):>7} "
            f"{one.mfu:>4.0%} {one.exposed_s / one.time.total_s:>5.1%}"
        )
        lines.append(("pass" if number == 0 else "plain", text))
    return lines


def _best(unit: ModuleType, request: Request, best: Plan, figures: Figures) -> Lines:
    shares = shares_of(best.time)
    parts = [f"{share:.0%} {name}" for name, share in shares.items() if share >= 5e-3]
    memory = best.memory
    kinds = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
    }
    held = [f"{gb(size)} {name}" for name, size in kinds.items()]
    lines: Lines = [("plain", "")]
    for name, text in (
        ("step", f"{time_words(best.time.total_s)}: {', '.join(parts)}"),
        ("memory", ", ".join(held)),
        ("speed", f"{large(figures['tokens_per_s'] or 0)} tokens per second"),
    ):
        lines += _wrapped(name, text)
    if request.tokens:
        days, hours = figures["days"] or 0.0, figures["gpu_hours"] or 0.0
        text = f"{large(request.tokens)} tokens in {days:,.1f} days without failures, "
        text += f"{large(hours)} GPU-hours"
        if figures["price"] is not None:
            text += f", ${figures['price']:,.0f}"
        lines += _wrapped("run", text)
        lines += _failures(unit, request, days)
    return lines


def _failures(unit: ModuleType, request: Request, days: float) -> Lines:
    """Say how much longer the run takes with failures, if we know their rate."""
    found = goodput_of(unit, request.question, days * DAY_S)
    if found is None:
        return []
    spare = recovery_of(request.question).spare_nodes
    text = (
        f"one every {_hours(found.mtbf_s)}, so save every {_hours(found.interval_s)}: "
        f"{found.wall_s / DAY_S:,.1f} days, {found.share:.1%} of them useful"
    )
    if request.price:
        nodes = "1 spare node" if spare == 1 else f"{spare} spare nodes"
        text += f", ${found.price:,.0f} with {nodes}"
    return _wrapped("failures", text)


def _hours(seconds: float) -> str:
    if seconds >= 2 * DAY_S:
        return f"{seconds / DAY_S:.3g} days"
    return f"{seconds / 3600:.3g} h" if seconds >= 7200 else f"{seconds / 60:.3g} min"


def _simulated(
    unit: ModuleType, request: Request, best: Plan, html: str
) -> dict[str, Any]:
    """Run the best plan in the simulator, and draw one of its pipelines."""
    from distlab.curriculum.units import load
    from distlab.plan.played import one_pipeline, play
    from distlab.trace import to_html

    began_s = time.perf_counter()
    pipeline = load("pipeline_parallel", "reference")
    played = play(unit, pipeline, request.question, best)
    drawn = one_pipeline(pipeline, request.question, played)
    root = load_curriculum().root
    page = Path(html) if html else Progress(root).folder / "last/plan.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    verdict = f"one pipeline of {best.layout.num_gpus // best.layout.pipeline:,}"
    to_html(drawn, page, title=f"{request.model.name}: one step", verdict=verdict)
    return {
        "step_s": played.step_s,
        "formula_s": best.time.total_s,
        "formula_error": best.time.total_s / played.step_s - 1,
        "messages": played.messages,
        "collectives": asdict(played.collectives),
        "html": str(page),
        "simulated_in_s": round(time.perf_counter() - began_s, 2),
    }


def _beside(simulated: dict[str, Any]) -> Lines:
    error = simulated["formula_error"]
    words = (
        f"{time_words(simulated['step_s'])} in the simulator, so the formula is "
        f"{abs(error):.1%} {'above' if error >= 0 else 'below'} it "
        f"({simulated['messages']:,} messages, "
        f"simulated in {simulated['simulated_in_s']:.2f} s)"
    )
    timeline = f"  timeline: {shown(Path(simulated['html']))}"
    return [*_wrapped("sim", words), ("dim", timeline)]


def _wrapped(name: str, text: str) -> Lines:
    first, *rest = wrapped(text, " " * 12, "")
    return [_line(name, first.strip()), *(("plain", line) for line in rest)]


def _why(unit: ModuleType, request: Request, best: Plan) -> Lines:
    from distlab.plan.derivation import SYMBOLS, derivations

    curriculum = load_curriculum()
    lines: Lines = [("plain", "")]
    lines += [("dim", line) for line in wrapped(SYMBOLS, "  ", "")]
    for one in derivations(unit, request.question, best):
        number = curriculum.task(one.lesson).number
        value = f"{one.name} = {_value(one.value, one.unit)}"
        lines.append(("plain", f"  {value:<60} lesson {number}"))
        for text in (one.formula, one.numbers):
            lines += [("dim", line) for line in wrapped(f"= {text}", "      ")]
    return lines


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return time_words(value)
    if unit == "B":
        return gb(value)
    return f"{value:.4g}" if value < 1 else f"{large(value)} {unit}".strip()


def _nothing_fits(request: Request, ranking: Ranking) -> Lines:
    if ranking.smallest is None:
        other = "--layout" if request.fixed else "number of GPUs, or --global-batch"
        problem = problem_of(request.question, request.fixed)
        example = f"; for example, {problem}" if problem else ""
        text = f"no layout is valid{example}. Choose another {other}"
    else:
        memory = ranking.smallest.memory.total_bytes
        text = (
            f"nothing fits: the smallest of {ranking.num_valid:,} layouts needs "
            f"{gb(memory)} on each GPU, but a GPU has "
            f"{gb(request.question.cluster.memory_bytes)}, so use more GPUs or a "
            "shorter sequence"
        )
    return [("fail", line) for line in wrapped(text, "  ")]


def _verdicts(judged: dict[str, bool]) -> Lines:
    return [
        ("pass" if true else "fail", f"  {'✓' if true else '✗'} {claim}")
        for claim, true in judged.items()
    ]


def large(value: float) -> str:
    """Format a large number with up to four digits and a word, as in 4.194 million."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if 1e15 > value >= size:
            return f"{value / size:.4g} {word}"
    return f"{value:,.0f}" if 1e4 <= value < 1e15 else f"{value:.4g}"


def gb(size: float) -> str:
    """Format a size in GB, which are 10^9 bytes."""
    return f"{size / 1e9:.3g} GB" if size < 1e12 else f"{size / 1e9:,.0f} GB"


def _as_data(
    unit: ModuleType,
    request: Request,
    ranking: Ranking,
    figures: Figures,
    judged: dict[str, bool],
    rows: int,
) -> dict[str, Any]:
    question = request.question
    size = unit.model_size(question.model, question.batch.sequence)
    return {
        "model": {
            "name": request.model.name,
            **asdict(question.model),
            "parameters": size.parameters,
            "flops_per_token": size.flops_per_token,
            "sources": request.model.sources,
        },
        "cluster": {
            "name": request.cluster.name,
            **_finite(asdict(question.cluster)),
            "sources": request.cluster.sources,
        },
        "gpus": question.num_gpus,
        "batch": asdict(question.batch),
        "valid": ranking.num_valid,
        "fitting": ranking.num_fitting,
        "smallest_bytes": ranking.smallest.memory.total_bytes
        if ranking.smallest
        else None,
        "best": figures or None,
        "goodput": _goodput_data(unit, request, figures),
        "asserts": judged,
        "plans": [
            {
                "layout": asdict(one.layout),
                "memory": asdict(one.memory),
                "memory_bytes": one.memory.total_bytes,
                "time": asdict(one.time),
                "step_s": one.time.total_s,
                "exposed_s": one.exposed_s,
                "mfu": one.mfu,
            }
            for one in ranking.plans[: max(1, rows)]
        ],
        "derivation": _derivation_data(unit, request, ranking),
    }


def _goodput_data(
    unit: ModuleType, request: Request, figures: Figures
) -> dict[str, Any] | None:
    days = figures.get("days")
    if days is None:
        return None
    question = request.question
    found = goodput_of(unit, question, days * DAY_S)
    assumed = asdict(recovery_of(question))
    return {**asdict(found), "assumed": assumed} if found else None


def _derivation_data(
    unit: ModuleType, request: Request, ranking: Ranking
) -> list[dict[str, Any]]:
    from distlab.plan.derivation import derivations

    if not ranking.plans:
        return []
    found = derivations(unit, request.question, ranking.plans[0])
    return [asdict(one) for one in found]


def _finite(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with None for infinity, which JSON doesn't know."""
    return {k: None if v == float("inf") else v for k, v in table.items()}
