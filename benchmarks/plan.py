"""How far the formulas of unit `planning` are off: published runs, search, simulator.

    published     the MFU of runs whose configuration and throughput are published
                  (published_runs.toml), predicted from the configuration alone
    choice        choose_layout beside the fastest of all valid layouts, on random cases
    simulation    step_time beside the same step in the simulator, up to 1,024 ranks

Nothing is fitted to the published runs. Each generation of GPUs has one efficiency
(distlab/plan/clusters.toml). Others measured it on a single node, or a single pod, in a
run that isn't among these. If MLSys·im and llm-analysis are installed, they predict the
same runs (_planners.py).

    distlab bench plan [--json]                exits with 1 when a bar is missed
    python benchmarks/plan.py --only published   one part: published, choice, simulation
    python benchmarks/plan.py --docs             also update those parts of docs/plan.md
"""

from __future__ import annotations

import itertools
import random
import resource
import statistics
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks._bars import Bench, Line, Report
from benchmarks._planners import NotModeledError, StepTimer, available, version_of
from distlab.curriculum.units import load
from distlab.given.planning import Batch, Cluster, Layout, Link, Model, Precision
from distlab.grading.checks.planning.forms import valid_layouts
from distlab.plan.catalog import find_cluster, find_model
from distlab.plan.formulas import formulas
from distlab.plan.plans import LAYOUT_FIELDS, Question, plan_of, shares_of
from distlab.plan.played import play

RUNS = Path(__file__).with_name("published_runs.toml")
AT_MOST = {
    "published_median_error": 0.15,
    "choice_worst_ratio": 1.05,
    "simulation_worst_error": 0.05,
    "simulation_cpu_s": 600.0,
    "simulation_peak_gib": 16.0,
}
AT_LEAST = {"published_runs": 12}
BENCH = Bench("plan", __doc__, at_least=AT_LEAST, at_most=AT_MOST)
result = BENCH.line
CASES = 200  # random ones, for choose_layout


# ── published runs ──────────────────────────────────────────────────────────────────


def published_runs() -> Iterator[dict[str, Any]]:
    """Yield each run of published_runs.toml, with its source's fields."""
    for source in tomllib.loads(RUNS.read_text(encoding="utf-8"))["source"]:
        common = {name: value for name, value in source.items() if name != "run"}
        for one in source["run"]:
            yield {"context": 1, "gradient_bytes": 2, **common, **one}


def layout_of(published: dict[str, Any]) -> Layout:
    """Return a published run's layout. We don't ask if the unit would allow it."""
    return Layout(**{field: published[name] for name, field in LAYOUT_FIELDS.items()})


def published_mfu(
    unit: ModuleType, question: Question, published: dict[str, Any]
) -> float:
    """Return the MFU that was published, or the one of the published FLOP/s.

    Megatron-LM's table 1 counts recomputation, by equation 3 of its paper, so we divide
    its operations by its FLOP/s, and get the seconds of a step.
    """
    if "mfu" in published:
        return float(published["mfu"])
    model, batch = question.model, question.batch
    if "tokens_per_s_per_gpu" in published:
        per_s = question.num_gpus * published["tokens_per_s_per_gpu"]
        step_s = batch.tokens / per_s
        return float(
            unit.mfu(model, batch, question.cluster, question.num_gpus, step_s)
        )
    per_layer = model.layers * model.hidden
    flops = 96.0 * batch.tokens * per_layer * model.hidden
    flops *= 1 + batch.sequence / (6 * model.hidden) + model.vocab / (16 * per_layer)
    step_s = flops / (question.num_gpus * published["hardware_tflops"] * 1e12)
    return float(unit.mfu(model, batch, question.cluster, question.num_gpus, step_s))


def question_of(published: dict[str, Any]) -> Question:
    """Return what a published run asks of a planner, but for its layout."""
    precision = Precision(gradients=published["gradient_bytes"])
    return Question(
        model=find_model(published["model"]).value,
        cluster=find_cluster(published["cluster"]).value,
        batch=Batch(
            sequence=published["seq"],
            global_batch=published["batch"],
            precision=precision,
        ),
        num_gpus=published["gpus"],
    )


def predict(
    unit: ModuleType, published: dict[str, Any], timers: Mapping[str, StepTimer]
) -> Line:
    """Return one run's published MFU, and what we and the other planners predict."""
    question, layout = question_of(published), layout_of(published)
    predicted = plan_of(unit, question, layout)
    mfu = published_mfu(unit, question, published)
    return {
        "source": published["title"],
        "url": published["url"],
        "model": published["model"],
        "cluster": published["cluster"],
        "gpus": published["gpus"],
        "published_mfu": round(mfu, 4),
        "predicted_mfu": round(predicted.mfu, 4),
        "error": round(predicted.mfu / mfu - 1, 4),
        "shares": {k: round(v, 4) for k, v in shares_of(predicted.time).items()},
        "others": {
            name: _predicted_by(timer, unit, question, layout, mfu)
            for name, timer in timers.items()
        },
    }


def _predicted_by(
    timer: StepTimer, unit: ModuleType, question: Question, layout: Layout, mfu: float
) -> Line:
    model, batch, cluster = question.model, question.batch, question.cluster
    parameters = unit.model_size(model, batch.sequence).parameters
    try:
        step_s = timer(question, layout, parameters)
    except NotModeledError as error:
        return {"skipped": str(error)}
    predicted = unit.mfu(model, batch, cluster, question.num_gpus, step_s)
    return {"mfu": round(predicted, 4), "error": round(predicted / mfu - 1, 4)}


def published(
    unit: ModuleType, timers: Mapping[str, StepTimer] | None = None
) -> tuple[list[Line], list[Line]]:
    """Return the figures, and a row for each run."""
    rows = [predict(unit, one, timers or {}) for one in published_runs()]
    errors = [abs(row["error"]) for row in rows]
    worst = max(rows, key=lambda row: abs(row["error"]))
    by_source = {
        source: round(
            statistics.median(abs(r["error"]) for r in rows if r["source"] == source), 4
        )
        for source in dict.fromkeys(row["source"] for row in rows)
    }
    return [
        result("published_runs", len(rows)),
        result(
            "published_median_error",
            round(statistics.median(errors), 4),
            by_source=by_source,
            efficiency={
                name: find_cluster(name).value.matmul_efficiency
                for name in dict.fromkeys(row["cluster"] for row in rows)
            },
        ),
        result(
            "published_worst_error",
            abs(worst["error"]),
            worst=f"{worst['model']} on {worst['gpus']} GPUs",
        ),
        *(_median_of(name, rows) for name in timers or {}),
    ], rows


def _median_of(name: str, rows: Sequence[Line]) -> Line:
    """Return another planner's median error, and ours on the same runs."""
    both = [row for row in rows if "error" in row["others"][name]]
    theirs = statistics.median(abs(row["others"][name]["error"]) for row in both)
    ours = statistics.median(abs(row["error"]) for row in both)
    slug = name.lower().replace("·", "").replace("-", "_")
    return result(
        f"{slug}_median_error",
        round(theirs, 4),
        n=len(both),
        ours=round(ours, 4),
        planner=name,
        note=f"ours {ours:.4g} on the same runs",
    )


# ── choose_layout ───────────────────────────────────────────────────────────────────


def random_case(numbers: random.Random) -> Question:
    """Return a random model, cluster and batch, small enough to try all layouts."""
    heads = numbers.choice([4, 8, 12, 16, 32])
    hidden = heads * numbers.choice([32, 64, 128])
    model = Model(
        layers=numbers.choice([4, 6, 8, 12, 16, 24]),
        hidden=hidden,
        heads=heads,
        kv_heads=numbers.choice([n for n in (1, 2, 4, heads) if heads % n == 0]),
        ffn=4 * hidden,
        vocab=numbers.choice([1000, 32_000, 128_256]),
        gated=numbers.random() < 0.5,
        tied=numbers.random() < 0.5,
    )
    per_node = numbers.choice([1, 2, 4, 8])
    cluster = Cluster(
        gpus_per_node=per_node,
        peak_flops=10 ** numbers.uniform(12.5, 15),
        memory_bytes=10 ** numbers.uniform(9, 11.5),
        memory_bytes_per_s=10 ** numbers.uniform(11, 12.6),
        intra_node=Link(alpha_s=3e-6, bytes_per_s=10 ** numbers.uniform(10, 11.7)),
        inter_node=Link(alpha_s=1e-5, bytes_per_s=10 ** numbers.uniform(9, 10.7)),
        matmul_efficiency=numbers.uniform(0.3, 1.0),
    )
    return Question(
        model=model,
        batch=Batch(
            sequence=numbers.choice([256, 1024, 4096]),
            global_batch=numbers.choice([4, 8, 16, 24, 32]),
        ),
        cluster=cluster,
        num_gpus=per_node * numbers.choice([1, 2, 4]),
    )


def fastest(unit: ModuleType, question: Question) -> float | None:
    """Return the shortest step of all layouts that are valid and fit, or None."""
    model, batch, cluster = question.model, question.batch, question.cluster
    return min(
        (
            float(unit.step_time(model, layout, batch, cluster).total_s)
            for layout in valid_layouts(model, batch, question.num_gpus)
            if unit.step_memory(model, layout, batch).total_bytes
            <= cluster.memory_bytes
        ),
        default=None,
    )


def choice(unit: ModuleType, cases: int = CASES, seed: int = 0) -> list[Line]:
    """Return how much longer a step of the chosen layout takes than the best one."""
    numbers = random.Random(seed)
    ratios, without = [], 0
    for _ in range(cases):
        case = random_case(numbers)
        best_s = fastest(unit, case)
        chosen = unit.choose_layout(case.model, case.batch, case.cluster, case.num_gpus)
        if best_s is None or chosen is None:
            ratios.append(1.0 if best_s is chosen else float("inf"))
            without += 1
            continue
        chosen_s = plan_of(unit, case, chosen).time.total_s
        ratios.append(chosen_s / best_s)
    return [
        result(
            "choice_worst_ratio",
            round(max(ratios), 6),
            "chosen/best",
            n=cases,
            without_a_layout=without,
        )
    ]


# ── the simulator ───────────────────────────────────────────────────────────────────

# (model, cluster, sequences in a step, tokens in a sequence, layout)
SIMULATED: tuple[tuple[str, str, int, int, Layout], ...] = (
    ("llama-8b", "dgx-h100", 64, 8192, Layout(data=8, zero_stage=3)),
    ("llama-8b", "dgx-h100", 64, 8192, Layout(data=16, zero_stage=2, recompute="full")),
    ("llama-8b", "dgx-a100", 64, 4096, Layout(data=4, tensor=8, zero_stage=1)),
    ("llama-8b", "dgx-a100", 64, 4096, Layout(data=8, tensor=2, context=2,
        zero_stage=3)),
    ("megatron-7.5b", "dgx-a100", 64, 2048, Layout(tensor=16, recompute="full")),
    ("llama-8b", "dgx-h100", 128, 8192, Layout(data=8, pipeline=8, zero_stage=1)),
    ("llama-8b", "dgx-h100", 64, 2048, Layout(data=64, zero_stage=0)),
    ("gpt-3-175b", "dgx-a100", 128, 2048, Layout(data=2, tensor=8, pipeline=8,
        zero_stage=1, recompute="full")),
    ("gpt-3-175b", "dgx-a100", 192, 2048, Layout(data=4, tensor=8, pipeline=8, chunks=6,
        zero_stage=1, recompute="selective", sequence_parallel=True)),
    ("llama-70b", "dgx-h100", 64, 8192, Layout(data=4, tensor=8, pipeline=2,
        zero_stage=1, recompute="selective")),
    ("llama-70b", "dgx-h100", 64, 8192, Layout(data=4, tensor=4, pipeline=4, chunks=4,
        zero_stage=1, recompute="selective")),
    ("llama-70b", "dgx-h100", 128, 8192, Layout(data=128, zero_stage=3,
        recompute="full")),
    ("llama-70b", "dgx-a100", 256, 4096, Layout(data=64, tensor=4, zero_stage=3,
        recompute="selective")),
    ("llama-70b", "dgx-h100", 32, 32768, Layout(data=4, tensor=8, context=8,
        zero_stage=3, recompute="selective", sequence_parallel=True)),
    ("llama-70b", "dgx-h100", 256, 8192, Layout(data=16, tensor=8, pipeline=4,
        zero_stage=2, recompute="full", sequence_parallel=True)),
    ("megatron-76b", "dgx-a100", 512, 2048, Layout(data=16, tensor=8, pipeline=4,
        chunks=3, microbatch=2, zero_stage=0, recompute="full")),
    ("llama-70b", "dgx-h100", 512, 8192, Layout(data=32, tensor=8, pipeline=4,
        zero_stage=1, recompute="selective", sequence_parallel=True)),
    ("llama-70b", "dgx-h100", 512, 8192, Layout(data=256, tensor=2, context=2,
        zero_stage=3, recompute="selective", sequence_parallel=True)),
    ("gpt-3-175b", "dgx-h100", 512, 2048, Layout(data=32, tensor=16, pipeline=2,
        microbatch=4, zero_stage=2, recompute="full")),
    ("llama-405b", "dgx-h100", 256, 8192, Layout(data=8, tensor=8, pipeline=16,
        zero_stage=1, recompute="full", sequence_parallel=True)),
)  # fmt: skip


def simulate(unit: ModuleType, pipeline: ModuleType, case: Any) -> Line:
    """Return one layout's step by the formulas and in the simulator."""
    model, cluster, batch, sequence, layout = case
    question = Question(
        model=find_model(model).value,
        cluster=find_cluster(cluster).value,
        batch=Batch(sequence=sequence, global_batch=batch),
        num_gpus=layout.num_gpus,
    )
    problem = layout.problem(question.model, question.batch)
    assert not problem, problem
    planned = plan_of(unit, question, layout)
    played = play(unit, pipeline, question, planned)
    formula_s = planned.time.total_s
    return {
        "model": model,
        "cluster": cluster,
        "gpus": layout.num_gpus,
        "layout": "d{} t{} p{}x{} c{} zero{} {}".format(
            *(layout.data, layout.tensor, layout.pipeline, layout.chunks),
            *(layout.context, layout.zero_stage, layout.recompute),
        ),
        "formula_s": formula_s,
        "simulated_s": played.step_s,
        "error": round(formula_s / played.step_s - 1, 5),
        "messages": played.messages,
    }


def simulation(unit: ModuleType) -> tuple[list[Line], list[Line]]:
    """Return the figures, and a row for each layout."""
    pipeline = load("pipeline_parallel", "reference")
    began_s = time.process_time()
    rows = [simulate(unit, pipeline, case) for case in SIMULATED]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    worst = max(rows, key=lambda row: abs(row["error"]))
    return [
        result(
            "simulation_worst_error",
            abs(worst["error"]),
            n=len(rows),
            largest=max(row["gpus"] for row in rows),
            worst=f"{worst['model']} {worst['layout']}",
        ),
        result("simulation_cpu_s", round(time.process_time() - began_s, 1), "CPU s"),
        result("simulation_peak_gib", round(peak, 2), "GiB"),
    ], rows


# ── the report ──────────────────────────────────────────────────────────────────────

PARTS = ("published", "choice", "simulation")


def measure(only: str = "", docs: bool = False) -> Report:
    """Return all results, or those of one part, and the rows of the runs behind them.

    Raises:
        SystemExit: docs/plan.md is to be updated, and a planner is missing.
    """
    unit = formulas("reference")
    results: list[Line] = []
    rows: dict[str, list[Line]] = {"published": [], "simulation": []}
    timers, missing = available()
    if docs and missing:
        raise SystemExit(f"--docs needs both planners: {missing}")
    if only in ("", "published"):
        found, rows["published"] = published(unit, timers)
        results += found
    if only in ("", "choice"):
        results += choice(unit)
    if only in ("", "simulation"):
        found, rows["simulation"] = simulation(unit)
        results += found
    report = BENCH.report(results, **rows, missing=missing)
    if docs:
        write_docs(report)
    return report


def text(report: Report) -> list[str]:
    """Return the rows, which are printed above the figures without --json."""
    lines: list[str] = []
    for source, rows in itertools.groupby(report["published"], lambda r: r["source"]):
        lines.append(source)
        for row in rows:
            model = f"  {row['model']:<15} {row['gpus']:>6} GPUs"
            shares = f"published {row['published_mfu']:>6.1%}"
            shares += f"   predicted {row['predicted_mfu']:>6.1%}"
            others = "".join(
                f"   {name} {_error(one, '.1%')}" for name, one in row["others"].items()
            )
            lines.append(f"{model}   {shares}   {row['error']:+.1%}{others}")
    for row in report["simulation"]:
        model = f"  {row['model']:<12} {row['gpus']:>5}  {row['layout']:<36}"
        seconds = f"{row['formula_s']:>8.3f} s {row['simulated_s']:>8.3f} s"
        lines.append(f"{model} {seconds} {row['error']:+.2%}")
    missing = report["missing"].items()
    return lines + [f"{name} is skipped: {why}" for name, why in missing]


def _error(other: Line, digits: str) -> str:
    """Return another planner's error as text, or a dash if it can't predict the run."""
    return f"{other['error']:+{digits}}" if "error" in other else "–"


DOCS = Path(__file__).parents[1] / "docs/plan.md"


def parts(report: dict[str, Any]) -> dict[str, list[str]]:
    """Return the parts of docs/plan.md that we measured, by their names there."""
    found = {"published": _published_part, "simulated": _simulated_part}
    rows = {"published": report["published"], "simulated": report["simulation"]}
    return {name: part(report) for name, part in found.items() if rows[name]}


def _published_part(report: dict[str, Any]) -> list[str]:
    planners = [one for one in report["results"] if "planner" in one]
    names = [one["planner"] for one in planners]
    columns = ["run", "GPUs", "published MFU", "predicted", "error", *names]
    lines = [_row(columns), "|---" * len(columns) + "|"]
    for row in report["published"]:
        source = f"[{row['source'].partition(',')[0]}]({row['url']})"
        cells = [f"{row['model']}, {source}", f"{row['gpus']:,}"]
        cells += [f"{row['published_mfu']:.1%}", f"{row['predicted_mfu']:.1%}"]
        cells.append(f"{row['error']:+.0%}")
        cells += [_error(row["others"][name], ".0%") for name in names]
        lines.append(_row(cells))
    figures = {one["name"]: one["value"] for one in report["results"]}
    lines += [
        "",
        f"The median error of these {figures['published_runs']} runs is "
        f"{figures['published_median_error']:.1%}.",
    ]
    for one in planners:
        lines[-1] += (
            f" That of {one['planner']} {version_of(one['planner'])} is "
            f"{one['value']:.1%} on {one['n']} of them, where ours is "
            f"{one['ours']:.1%}."
        )
    return lines


def _simulated_part(report: dict[str, Any]) -> list[str]:
    rows = report["simulation"]
    worst = max(rows, key=lambda row: abs(row["error"]))
    median = statistics.median(abs(row["error"]) for row in rows)
    return [
        f"On {len(rows)} layouts of up to {max(row['gpus'] for row in rows):,} GPUs, "
        f"the median error of the formulas was {median:.1%}, and the largest was "
        f"{abs(worst['error']):.1%}, on {worst['gpus']} GPUs with {worst['layout']}."
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_docs(report: dict[str, Any], path: Path = DOCS) -> None:
    """Put what we measured where docs/plan.md has room for it."""
    page = path.read_text(encoding="utf-8")
    for name, lines in parts(report).items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, _, rest = page.partition(begin)
        after = rest.partition(end)[2]
        page = "\n".join([before + begin, "", *lines, "", end + after])
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, text, only=PARTS, docs=False))
