"""`distlab audit`: it names planted mistakes with their lines, and no others.

All scripts of the corpus are in `distlab bench audit`; here are a few of them, on one
cluster, and the parts that are quicker to try alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks.audit import RIGHT, WRONG, expected
from distlab.audit import NAMES, NOTES, audit, watching
from distlab.audit.places import Place
from distlab.audit.run import PRELOAD
from distlab.audit.source import assigned_at, is_under_rank_condition
from distlab.audit.watching.losses import terms_of
from distlab.cli.app import app
from distlab.runner import Cluster
from tests.workbench.golden import Golden


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(preload=PRELOAD) as cluster:
        yield cluster


@pytest.mark.parametrize("name", ["01-no-set-epoch", "19-sum-of-gradients"])
def test_a_planted_mistake_is_named_with_its_line(name: str, cluster: Cluster) -> None:
    script = WRONG / f"{name}.py"
    kind, lines = expected(script)
    report = audit(script, num_ranks=2, cluster=cluster)
    assert not report.is_right
    (finding,) = report.findings
    assert finding.name == kind
    assert finding.at == Place(str(script), finding.at.line)
    assert finding.at.line in lines


def test_a_right_script_has_no_findings(cluster: Cluster) -> None:
    report = audit(RIGHT / "21-by-hand.py", num_ranks=2, cluster=cluster)
    assert report.findings == []


def test_what_the_command_prints(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(WRONG)
    name = "09-layer-for-another-task.py"
    text = CliRunner().invoke(app, ["audit", "-n", "2", name])
    assert text.exit_code == 1
    golden("cli/audit", text.output)


def test_a_deadlock_as_json() -> None:
    script = str(WRONG / "12-evaluation-on-rank-0.py")
    run = CliRunner().invoke(app, ["audit", "--json", "-n", "2", script])
    told = json.loads(run.output)
    assert run.exit_code == 1
    assert told["outcome"] == "deadlock"
    (finding,) = told["findings"]
    assert finding["name"] == "rank-condition"
    assert finding["line"] in expected(Path(script))[1]


def test_real_ranks_tell_the_same(cluster: Cluster) -> None:
    script = WRONG / "09-layer-for-another-task.py"
    report = audit(script, num_ranks=2, real=True, cluster=cluster)
    assert report.outcome == "raised"
    assert [finding.name for finding in report.findings] == ["unused-parameters"]
    assert report.findings[0].at.line in expected(script)[1]


def test_a_script_that_cannot_start(tmp_path: Path, cluster: Cluster) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nfor\n")
    (finding,) = audit(script, num_ranks=2, cluster=cluster).findings
    assert finding.name == "failed"


def test_the_corpus_is_large_enough_and_marked() -> None:
    wrong, right = list(WRONG.glob("*.py")), list(RIGHT.glob("*.py"))
    assert len(wrong) >= 40
    assert len(right) >= 40
    for script in wrong:
        kind, lines = expected(script)
        assert kind in NAMES.keys() - NOTES
        assert lines
        assert "https://github.com/" in script.read_text()
    assert not any(expected(script)[1] for script in right)


@pytest.mark.parametrize(
    "arguments",
    [["no-such-file.py"], ["-n", "1", __file__], ["--ignore", "nothing", __file__]],
)
def test_bad_requests_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["audit", *arguments]).exit_code == 2


def test_every_note_has_a_name() -> None:
    assert set(NAMES) >= NOTES


def test_how_much_an_element_of_a_loss_weighs() -> None:
    scores = torch.randn(4, 3, requires_grad=True)
    targets = torch.tensor([0, 1, -100, 2])
    entropy = nn.functional.cross_entropy
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    known = [
        (entropy(scores, targets) / 4, [(1 / 12, 3)]),
        (entropy(scores, targets, reduction="sum") * 0.5, [(0.5, 3)]),
        (-(scores.mean() / 2), [(-1 / 24, 12)]),
        (nn.functional.mse_loss(scores, scores.detach()), [(1 / 12, 12)]),
        ((scores.sum(1) * mask).sum() / mask.sum(), [(1 / 3, 3)]),
        (scores.mean() + scores.sum(), [(1 / 12, 12), (1.0, 12)]),
        (scores.mean() * scores.sum(), []),
    ]
    for loss, terms in known:
        told = list(terms_of(loss))
        assert [count for _, count in told] == [count for _, count in terms]
        assert [w for w, _ in told] == pytest.approx([w for w, _ in terms])


def test_what_the_source_tells(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "rate = 0.1\n"
        "if rank == 0:\n"
        "    save()\n"
        "def evaluate():\n"
        "    if get_rank() != 0:\n"
        "        return\n"
        "    barrier()\n"
        "rate = rate * world_size\n"
        "optimizer = SGD(params, lr=rate)\n"
    )
    under = {
        line: is_under_rank_condition(Place(str(path), line)) for line in (1, 3, 7, 9)
    }
    assert under == {1: False, 3: True, 7: True, 9: False}
    found = assigned_at(Place(str(path), 9), "lr", "world_size")
    assert found == Place(str(path), 8)


def test_every_step_of_every_optimizer_is_written_down_whole(tmp_path: Path) -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    first, second = torch.optim.Adam(weights[:1]), torch.optim.SGD(weights[1:2])
    third = torch.optim.LBFGS(weights[2:], max_iter=1)

    def closure() -> torch.Tensor:
        for _ in range(60):  # each is an event
            loss = weights[2].square().sum()
            loss.backward()
        return loss

    with watching.installed(), watching.watched(0, tmp_path) as log:
        for optimizer in (first, second):
            optimizer.step()
        third.step(closure)
    steps = list(log.of("step"))
    assert [step["number"] for step in steps] == [0, 1, 2]
    assert [len(step["after"]) for step in steps] == [1, 1, 1]
