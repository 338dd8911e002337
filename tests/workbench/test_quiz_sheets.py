"""The accounting sheets: their formulas against the course's own, and what is right."""

# ruff: noqa: N803 - arguments have the names of the symbols

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import cast

import pytest
import torch

from distlab.cli.quiz import quiz
from distlab.comm import Comm
from distlab.curriculum import Progress, load_curriculum
from distlab.curriculum.arithmetic import FormulaError, evaluate, spelled_out
from distlab.curriculum.quiz import AnswerError, Posed, QuizError, read_questions
from distlab.given.monitoring import Record
from distlab.given.planning import (
    Batch,
    Cluster,
    Goodput,
    Layout,
    Link,
    Model,
    Recovery,
)
from solutions.phase1_data_parallel import collectives, data_loader
from solutions.phase2_advanced.pipeline_parallel import one_f_one_b
from solutions.phase3_multi_node import planning, topology
from solutions.phase3_multi_node.sharded_optimizer import bytes_per_rank
from solutions.phase4_production.gradient_compression import largest
from solutions.phase4_production.monitoring import step_report
from tests.workbench.course import ROOT, Course
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

Capture = pytest.CaptureFixture[str]
SHEETS = [ROOT / phase.folder / "sheet.toml" for phase in load_curriculum(ROOT).phases]
QUESTIONS = {
    question.id: question for path in SHEETS for question in read_questions(path)
}


# ── every formula against the course's own functions ────────────────────────────────


class Counted:
    """Stands in for a rank's communicator, and counts messages and bytes."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size
        self.sent = self.received = self.messages = 0

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self.sent += tensor.nbytes
        self.messages += 1

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self.received += tensor.nbytes

    def sendrecv(
        self, tensor: torch.Tensor, dst: int, to: torch.Tensor, _: int
    ) -> None:
        self.send(tensor, dst)


def star_link(B: int, n: int) -> float:
    rank_0 = Counted(n)
    collectives.all_reduce(cast("Comm", rank_0), torch.zeros(B, dtype=torch.int8))
    return rank_0.sent + rank_0.received


def tree_seconds(n: int, t: int) -> float:
    source = Counted(n)
    collectives.tree_broadcast(cast("Comm", source), torch.zeros(1), 0)
    return source.messages * t  # the source sends in each round


def reduce_scatter_bytes(B: int, n: int) -> float:
    rank, whole = Counted(n), torch.zeros(B * n, dtype=torch.int8)
    output = torch.zeros(B, dtype=torch.int8)
    collectives.reduce_scatter(cast("Comm", rank), output, whole)
    return rank.sent / n  # of an input of B bytes


def steps_of_an_epoch(N: int, n: int, b: int) -> float:
    return ceil(len(data_loader.shard_indices(N, 0, n)) / b)


def padding(N: int, n: int) -> float:
    return sum(len(data_loader.shard_indices(N, rank, n)) for rank in range(n)) - N


def memory_of_a_step(N: int, A: int, k: int) -> float:
    return bytes_per_rank(N, 1, 0, (2, 2, 12)) + A / k


def a_model(layers: int = 1, hidden: int = 8, ffn: int = 8) -> Model:
    return Model(layers=layers, hidden=hidden, heads=1, kv_heads=1, ffn=ffn, vocab=8)


FAST = Link(alpha_s=0, bytes_per_s=1)
GPUS = Cluster(
    gpus_per_node=64,
    peak_flops=1e12,
    memory_bytes=1e12,
    memory_bytes_per_s=1e12,
    intra_node=FAST,
    inter_node=FAST,
)


def bubble_share(p: int, m: int) -> float:
    layout, batch = Layout(pipeline=p), Batch(sequence=8, global_batch=m)
    step = planning.step_time(a_model(layers=p), layout, batch, GPUS)
    useful = step.compute_s + step.pipeline_s + step.tensor_s + step.context_s
    return step.bubble_s / (useful + step.bubble_s)


def activations_in_flight(p: int, r: int, m: int, A: int) -> float:
    kept = most = 0
    for action in one_f_one_b(r, p, m):
        kept += 1 if action.kind == "F" else -1
        most = max(most, kept)
    return most * A


def tensor_parallel_bytes(b: int, s: int, h: int, t: int) -> float:
    batch = Batch(sequence=s, global_batch=b)
    layout = Layout(tensor=t, microbatch=b)
    return planning.tensor_s(a_model(hidden=h), layout, batch, GPUS)


def weights_of_a_layer(h: int, f: int, t: int) -> float:
    return planning.layer_parameters(a_model(hidden=h, ffn=f), Layout(tensor=t))


def ring_seconds(B: int, n: int, a: int, W: int) -> float:
    return topology.estimate_time(n, B, topology.Link(a, W))["ring"]


def bytes_between_nodes(B: int, q: int, k: int) -> float:
    return topology.estimate_time(q, B // k, topology.Link(0, 1))["ring"]


def zero_2_memory(N: int, n: int) -> float:
    return bytes_per_rank(N, n, 2, (2, 2, 12))


def server_load(B: int, n: int, k: int) -> float:
    return sum(B / k for _worker in range(n) for _way in ("push", "pull"))


def flop_per_token(N: int, L: int, h: int, s: int) -> float:
    size = planning.model_size(a_model(layers=L, hidden=h), s)
    return size.flops_per_token - size.weight_flops + 6 * N


def a_goodput(n: int, c: float, M: float, d: float, r: float) -> Goodput:
    recovery = Recovery(save_s=c, detection_s=d, restart_s=r, repair_s=0)
    return planning.goodput(replace(GPUS, gpu_mtbf_s=M), n, recovery, 1.0)


def checkpoint_interval(c: int, M: int, n: int) -> float:
    return a_goodput(n, c, M, 1, 1).interval_s


def lost_by_a_failure(n: int, T: int, d: int, r: int) -> float:
    return n * a_goodput(1, 1, T * T / 2, d, r).lost_s  # T is Young's interval


def top_k_bytes(N: int, r: float, n: int) -> float:
    values = torch.ones(N)
    indices = largest(values, r)
    return (n - 1) * (indices.nbytes + values[indices].nbytes)


def goodput(T: float, c: float, M: float, F: float) -> float:
    return a_goodput(1, c, M, F - T / 2, 0).share  # T is Young's interval


def cost_of_a_straggler(n: int, t: int, f: int) -> float:
    seconds = [f * t, *[t] * (n - 1)]
    records = [Record(rank, 0.0, s, 0.0, 1.0, 1) for rank, s in enumerate(seconds)]
    step_s = n / step_report(records).samples_per_s
    return sum(step_s - s for s in seconds)


MULTIPLES = {  # what a course's function wants to divide, and by which symbol
    "reduce-scatter-bytes": ("B", "n"),
    "bytes-between-nodes": ("B", "k"),
    "zero-2-memory": ("N", "n"),
    "weights-of-a-layer": ("h", "t"),
}
OWN: list[Callable[..., float]] = [
    star_link, tree_seconds, reduce_scatter_bytes, steps_of_an_epoch, padding,
    memory_of_a_step, bubble_share, activations_in_flight, tensor_parallel_bytes,
    weights_of_a_layer, ring_seconds, bytes_between_nodes, zero_2_memory, server_load,
    flop_per_token, checkpoint_interval, lost_by_a_failure, top_k_bytes, goodput,
    cost_of_a_straggler,
]  # fmt: skip


def name_of(own: Callable[..., float]) -> str:
    return own.__name__.replace("_", "-")


def test_each_phase_has_a_sheet_of_five() -> None:
    assert [len(read_questions(path)) for path in SHEETS] == [5] * 4
    assert set(QUESTIONS) == {name_of(own) for own in OWN}
    assert all(question.symbols for question in QUESTIONS.values())


@pytest.mark.parametrize("own", OWN, ids=name_of)
def test_the_right_formula_has_the_value_of_the_course(
    own: Callable[..., float],
) -> None:
    question = QUESTIONS[name_of(own)]
    dice = random.Random(question.id)
    for _ in range(8):
        names: dict[str, float] = {}
        for name, symbol in question.symbols.items():
            value = symbol.drawn(dice)
            whole = isinstance(symbol.low, int)
            small = name in ("B", "N", "A") and value > 50_000
            names[name] = int(value) % 50_000 + 64 if small else value
            names[name] = int(names[name]) if whole else names[name]
        if question.id in MULTIPLES:
            multiple, divisor = MULTIPLES[question.id]
            names[multiple] *= names[divisor]
        if question.id == "weights-of-a-layer":
            names["f"] *= names["t"]
        if question.id == "top-k-bytes":
            names["N"], names["r"] = names["N"] * 8, dice.randint(1, 4) / 8
        if question.id == "goodput":
            names["M"] = names["T"] ** 2 / (2 * names["c"])
        right = evaluate(question.answer, names)
        assert own(**names) == pytest.approx(right, rel=1e-9), names


# ── what learners write ─────────────────────────────────────────────────────────────

WRITTEN = {  # a different way to write each, and a mistake
    "star-link": ("2nB - 2B", "(n-1)B"),
    "tree-seconds": ("t*ceil(log2(n))", "(n-1)t"),
    "reduce-scatter-bytes": ("B − B/n", "B"),
    "steps-of-an-epoch": ("ceil(N/n/b)", "N//n//b"),
    "padding": ("n⌈N/n⌉ - N", "N % n"),
    "memory-of-a-step": ("A/k + (2+2+4+4+4)N", "16N + A"),
    "bubble-share": ("1 - m/(m+p-1)", "(p-1)/m"),
    "activations-in-flight": ("A min(p-r, m)", "A(p-r)"),
    "tensor-parallel-bytes": ("4 * 2 * 2 b s h * (1 - 1/t)", "16 b s h"),
    "weights-of-a-layer": ("h(4h+3f)/t + 2h", "(4h^2 + 3h f + 2h)/t"),
    "ring-seconds": ("2(n-1)a + 2(n-1)B/(n W)", "2(n-1)a + 2B/W"),
    "bytes-between-nodes": ("2B(1-1/q)/k", "2B/k"),
    "zero-2-memory": ("N(2 + 14/n)", "4N + 12N/n"),
    "server-load": ("(n B + n B)/k", "n B/k"),
    "flop-per-token": ("6(N + 2 L h s)", "6N"),
    "checkpoint-interval": ("(2 c M/n)**0.5", "sqrt(2 c M)"),
    "lost-by-a-failure": ("n d + n r + n T/2", "n(d + r + T)"),
    "top-k-bytes": ("4N * 2r(n-1)", "4(n-1)r N"),
    "goodput": ("1/((1 + c/T)(1 + F/M))", "1 - c/T - F/M"),
    "cost-of-a-straggler": ("n f t - t(n-1) - f t", "n(f-1)t"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_another_spelling_is_right_and_a_mistake_is_told_with_values(name: str) -> None:
    posed = QUESTIONS[name].drawn(3)
    other, mistake = WRITTEN[name]
    assert posed.is_right(posed.right_answer)
    assert posed.is_right(other)
    assert not posed.difference(other)
    assert not posed.is_right(mistake)
    said = posed.difference(mistake)
    for symbol in posed.question.symbols:
        assert re.search(rf"\b{symbol} = [\d.,e+-]+", said), said


def test_the_values_that_are_told_are_those_of_both_formulas() -> None:
    posed = QUESTIONS["reduce-scatter-bytes"].drawn(0)
    said = posed.difference("B")  # (n - 1) / n is missing
    numbers = re.findall(r"\d[\d,.]*\d|\d", said)
    size, n, given, right = (float(number.replace(",", "")) for number in numbers)
    assert given == size
    assert right == pytest.approx((n - 1) / n * size, rel=1e-3)
    assert n == min(sample.names["n"] for sample in posed.samples)


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        ("", "''"), ("x + 1", r"\bx\b"), ("B bytes", r"\bbytes\b"), ("2 *", r"'2\*'"),
        ("B/2n", r"\* .*\bn$"), ("B; n", "';'"), ("B if n else 2", r"\bif\b"),
        ("__import__('os')", '"\'"'), ("B.real", r"'\.'"), ("n/(B-B)", r"\bvalue\b"),
    ],
)  # fmt: skip
def test_what_is_no_formula_is_neither_right_nor_wrong(formula: str, said: str) -> None:
    told = refusal(AnswerError, QUESTIONS["star-link"].drawn(0).is_right, formula)
    assert re.search(said, told), told


def test_paper_is_spelled_out() -> None:
    assert spelled_out("2 (n − 1)B · n") == "2*(n-1)*B*n"
    assert spelled_out("2nB + 3nx", {"n", "B"}) == "2*n*B+3*nx"
    assert spelled_out("ceil(N/n)n^2") == "ceil(N/n)*n**2"
    assert spelled_out("max(1, 2e3n)/(2n)") == "max(1,2e3*n)/(2*n)"
    assert spelled_out("⌈N/n⌉ h²") == "ceil(N/n)*h**2"
    with pytest.raises(FormulaError, match=r"\b000$"):
        spelled_out("1 000 n")
    for two_readings in ("B/2n", "1/(n) B", "n // 2B", "2(n-1)/n B", "B/nq"):
        with pytest.raises(FormulaError):
            spelled_out(two_readings, "Bnq")


# ── the verb ────────────────────────────────────────────────────────────────────────


def right_answers(path: Path) -> list[Posed]:
    return [question.drawn(3) for question in read_questions(path)]


def test_a_sheet_is_asked_and_kept(
    here: Course, capsys: Capture, golden: Golden
) -> None:
    answers = [posed.right_answer for posed in right_answers(SHEETS[2])]
    answers[1], answers[3] = "2B/k", "furlongs"
    assert quiz(3, sheet=True, answers=";".join(answers), seed=3) == 0
    said = capsys.readouterr().out
    assert re.search(r"^3 of 4\b", said, re.MULTILINE)
    assert re.search(r"\bq = \d+", said)
    kept = Progress(here.root).read()["quiz"]
    assert kept["3/sheet/bytes-between-nodes"] == {"answer": "2B/k", "right": False}
    assert kept["3/sheet/ring-seconds"]["right"] is True
    golden("cli/quiz-sheet", said)


def test_a_second_try_comes_with_the_values(
    here: Course, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("(n-1)B\n2B(n-1)\nq\n"))
    assert quiz(1, sheet=True, seed=1) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"\bB = [\d,]+", said)) == 1
    assert re.search(r"^1 of 1\b", said, re.MULTILINE)


GOOD = '[[question]]\nid = "x"\nask = "?"\nwhy = "!"\n'
BAD = [
    ('answer = "n"\nsymbols = { n = [1, 2] }', r"\(x\): symbols\b"),
    ('answer = "n"\nsymbols = { n = [2, 1, "ranks"] }', r"\(x\): symbols\b"),
    ('answer = "m"\nsymbols = { n = [1, 2, "ranks"] }', r"\(x\): 'm'"),
    ('answer = "1 / (n - 2)"\nsymbols = { n = [1, 3, "ranks"] }', r"'1 / \(n - 2\)'"),
    ('answer = "n"\nsymbols = { n = [1, 2, "r"] }\ntolerance = 0.1', r"\(x\).*symbols"),
]


def test_a_bad_sheet_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "sheet.toml"
    for text, named in BAD:
        path.write_text(GOOD + text, encoding="utf-8")
        assert re.search(named, refusal(QuizError, read_questions, path)), named
