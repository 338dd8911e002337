"""`distlab use` and `distlab diff`: whose part it is, and both parts side by side."""

from __future__ import annotations

import re

import pytest

from distlab.cli.diff import diff, side_by_side
from distlab.cli.use import use
from distlab.curriculum import CurriculumError, SourceError, load_curriculum
from distlab.curriculum.choose import Choice, Side, chosen_unit
from tests.workbench.course import EXCHANGE, FIRST, SECOND, Course, filled
from tests.workbench.golden import Golden

Capture = pytest.CaptureFixture[str]


def choose(default: Side = "auto") -> Choice:
    return chosen_unit(load_curriculum(), "collectives", default)


def whose(choice: Choice) -> dict[str, str]:
    return {part.task: part.whose for part in choice.parts}


# ── use ─────────────────────────────────────────────────────────────────────────────


def test_auto_is_mine_once_it_has_passed(here: Course, golden: Golden) -> None:
    here.fill(FIRST, "return 'mine'")
    assert set(whose(choose()).values()) == {"reference"}
    here.judged(FIRST, passed=True)
    choice = choose()
    assert whose(choice)[FIRST] == "mine"
    assert whose(choice)[SECOND] == "reference"
    lines = re.sub(r"\b[0-9a-f]{12}\b", "<digest>", "\n".join(choice.lines()))
    golden("cli/use", lines)
    module = choice.load()
    assert module.send_recv(None, None) == "mine"
    assert "NotImplementedError" not in module.ring_shift.__code__.co_names
    here.judged(FIRST, passed=False)
    assert set(whose(choose()).values()) == {"reference"}


def test_settings_of_units_and_tasks(
    here: Course, capsys: Capture, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    use("mine", ["trainer"])
    golden("cli/use-mine-unwritten", capsys.readouterr().out)
    here.fill(FIRST, "return 'mine'")
    assert use("mine", ["collectives"]) == 0
    said = capsys.readouterr().out
    (changed, others) = said.splitlines()
    assert re.search(rf"^1\.1 +{FIRST} +yours +[0-9a-f]{{12}}$", changed)
    num_tasks = len(load_curriculum().tasks)
    assert str(num_tasks - 1) in others
    assert choose().load().send_recv(None, None) == "mine"
    use("reference", ["1.1"])
    assert whose(choose())[FIRST] == "reference"
    capsys.readouterr()
    use("reference", ["1.1"])
    assert str(num_tasks) in capsys.readouterr().out.splitlines()[0]  # as before
    use("mine", ["collectives"])  # the whole unit again: its tasks' settings go
    assert whose(choose())[FIRST] == "mine"
    monkeypatch.setenv("DISTLAB_IMPL", "reference")
    assert set(whose(choose()).values()) == {"reference"}
    capsys.readouterr()
    use()
    said, beside = capsys.readouterr()
    assert "DISTLAB_IMPL=reference" in beside
    assert len(said.splitlines()) == num_tasks
    monkeypatch.setenv("DISTLAB_IMPL", "yours")
    with pytest.raises(CurriculumError, match=r"DISTLAB_IMPL.*'yours'"):
        use()


def test_a_file_that_is_no_python(here: Course) -> None:
    here.template().write_text("def (")
    choice = choose()
    assert set(whose(choice).values()) == {"reference"}
    assert re.search(r"\bline 1\b", choice.parts[0].why)
    assert choice.load().send_recv
    with pytest.raises(SourceError, match=r"template_collectives\.py") as caught:
        choose("mine")
    assert caught.value.line == 1
    with pytest.raises(SourceError):
        use("mine")
    assert use("reference") == 0  # the way out of it


@pytest.mark.parametrize(
    ("side", "names", "named"),
    [
        ("yours", [], "'yours'"),
        ("mine", ["9.9"], r"'9\.9'.*\bcollectives\b"),
        ("mine", [""], "''"),
    ],
)
def test_what_cannot_be_used(
    here: Course, side: str, names: list[str], named: str
) -> None:
    with pytest.raises(CurriculumError, match=named):
        use(side, names)
    assert not (here.state / "progress.json").exists()


def test_an_unknown_unit(here: Course) -> None:
    with pytest.raises(CurriculumError, match="'x'"):
        chosen_unit(load_curriculum(), "x")


# ── diff ────────────────────────────────────────────────────────────────────────────


def test_diff_waits_for_the_pass(here: Course, capsys: Capture) -> None:
    here.fill(FIRST, EXCHANGE)
    assert diff("1.1") == 1
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(r"distlab: 1\.1 .* 1\.1 --anyway\n", err)
    assert diff("1.1", anyway=True) == 0
    here.judged(FIRST, passed=True)
    capsys.readouterr()
    assert diff(width=200) == 0  # 1.1 was checked last
    said = capsys.readouterr().out
    assert diff("1.1", width=200) == 0
    assert said == capsys.readouterr().out
    changed = {line[0]: line for line in said.splitlines() if "comm.send(" in line}
    assert set(changed) == {"-", "+"}
    assert ("dst=" in changed["-"], "dst=" in changed["+"]) == (False, True)
    assert "SOLUTION" not in said
    assert "#|" not in said


def test_diff_of_the_same_and_of_what_is_missing(here: Course, capsys: Capture) -> None:
    same = "if comm.rank == 0:\n    comm.send(tensor, dst=1)\nelif comm.rank == 1:"
    here.template().write_text(filled(FIRST, f"{same}\n    comm.recv(tensor, src=0)"))
    here.judged(FIRST)
    assert diff("1.1") == 0
    assert re.fullmatch(rf"1\.1 {FIRST}\b.*\n", capsys.readouterr().out)
    here.template().write_text("x = 1\n")
    with pytest.raises(SourceError, match=r"\bsend_recv$"):
        diff("1.1")
    here.template().write_text("def (")
    with pytest.raises(SourceError, match=r"template_collectives\.py") as caught:
        diff("1.1")
    assert caught.value.line == 1
    with pytest.raises(CurriculumError, match=r"'9\.9'"):
        diff("9.9")


def test_side_by_side_keeps_its_columns() -> None:
    rows = [row for _, row in side_by_side(["a", "b" * 90], ["a", "c", "d"], 123)]
    assert [row.index("│") for row in rows] == [61] * 4
    assert rows[2].endswith("│ c")
    assert max(map(len, rows)) <= 123
