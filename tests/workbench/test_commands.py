"""Every command that a reader meets can be typed as it stands.

They are read out of the texts and taken as far as they go without running: the verb,
its options, the tasks, files, networks, faults and names in them. What runs them for
real: `make demo` and the tests of each verb.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from distlab.cli.app import app
from distlab.cli.script_args import script_of
from distlab.curriculum import load_curriculum
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.curriculum.torch_errors import find_torch_errors, read_torch_errors
from distlab.grading.written_tests import units_with_tests
from distlab.plan.catalog import find_cluster, find_model
from distlab.sim.net.quantities import num_bytes
from distlab.sim.net.spec import parse_faults, parse_net
from distlab.simulated.target import find_target
from distlab.tutor.concepts import find_concept
from distlab.tutor.ranking import nearest

ROOT = Path(__file__).resolve().parents[2]
CURRICULUM = load_curriculum(ROOT)
TEXTS = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("phase*/guidelines.md"),
    *ROOT.glob("phase*/guide/*.md"),
    *ROOT.glob("phase*/hints/*.md"),
]
FILLED_IN = {"my_file.py", "shuffled.py", "train.py"}  # the reader writes them
_INLINE = re.compile(r"`((?:distlab|python3?|pytest|make|torchrun) [^`]+)`")
_LINE = re.compile(r"^((?:distlab|python3?|pytest|make|torchrun) .+?)(?:\s+#.*)?$")


def commands_of(text: str) -> Iterator[str]:
    """Each command in a text: between backticks, or as a line of a block of code."""
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for block in fenced:
        for line in block.replace("\\\n", " ").splitlines():
            if match := _LINE.match(line.strip()):
                yield match[1]
    prose = re.sub(r"^```[a-z]*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"\n>? *", " ", prose)  # a command may go on in the next line
    yield from _INLINE.findall(prose)


def _is_a_pattern(command: str) -> bool:
    """`distlab explain NAME` and `distlab hint …` stand for many commands."""
    return bool(re.search(r"…|\b[A-Z]{2,}\b(?!=)|<", command.replace("MiB", "")))


def expect_typeable(command: str) -> None:
    """Go as far with a command as is possible without running it.

    Raises:
        Exception: it cannot be typed like that; of several kinds, as the parts raise.
    """
    command = re.split(r" (?:2>&1|>|\|) ", command)[0]  # redirected, or into a pipe
    program, *arguments = shlex.split(command)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in arguments if "=" not in word} <= set(targets)
    elif program == "distlab":
        _expect_verb(arguments)
    else:
        for word in arguments:
            path = word.partition("::")[0]
            if path.endswith(".py") and path not in FILLED_IN:
                assert (ROOT / path).is_file(), path


FOR_SCRIPTS = ("sim", "audit")


@functools.cache
def _group() -> TyperGroup:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return group


def _expect_verb(arguments: list[str]) -> None:
    group = _group()
    if arguments == ["--help"]:
        return
    context = typer.Context(group, info_name="distlab")
    name, verb, rest = group.resolve_command(context, arguments)
    assert verb is not None
    if not rest:  # the verb's name, in a sentence about it
        return
    made = verb.make_context(name, list(rest), parent=context)
    if name in FOR_SCRIPTS and script_of(made) is not None:
        return  # the reader's own script
    _expect_names(str(name), made.params)


def _expect_explained(words: object) -> None:
    assert isinstance(words, list | tuple)
    asked = " ".join(map(str, words))
    errors = {error.name for error in read_torch_errors()}
    names = {*read_misconceptions(), *errors}
    assert (
        not asked
        or asked in names
        or find_concept(asked)
        or find_torch_errors(asked)
        or (" " in asked and nearest(asked))
    ), asked


def _expect_names(verb: str, given: dict[str, object]) -> None:
    """What is named in a command is there: tasks, slugs, networks, data."""
    one = [given["task"]] if given.get("task") else []
    several = given.get("tasks") or given.get("names") or []
    assert isinstance(several, list | tuple)
    for task in [*one, *several]:
        known = str(task).isdecimal() or str(task) in CURRICULUM.units
        if not known:
            CURRICULUM.task(str(task))
    if verb == "explain":
        _expect_explained(given["asked"] or ())
    elif verb == "status" and given["route"]:
        CURRICULUM.route(str(given["route"]))
    elif verb == "score-test" and given["name"]:
        assert given["name"] in {u.name for u in units_with_tests(CURRICULUM)}
    elif verb in ("sim", "scale"):
        _expect_simulated(given)
    elif verb == "plan":
        _expect_planned(given)
    elif verb == "ddp" and given["dataset"] != "digits":
        assert given["download"] or given["data_dir"], "its data is not in the checkout"


def _expect_simulated(given: dict[str, object]) -> None:
    target = str(given["name"])
    if target.partition(":")[0] not in FILLED_IN:
        find_target(CURRICULUM, target, "reference")
    parse_net(str(given["net"]))
    num_bytes(str(given["size"]))
    if given.get("fault"):
        parse_faults(str(given["fault"]))


def _expect_planned(given: dict[str, object]) -> None:
    for name, find in (("model", find_model), ("cluster", find_cluster)):
        if not str(given[name]).startswith("my-"):  # a file of the reader's
            find(str(given[name]))


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_can_be_typed_as_they_stand(path: Path) -> None:
    wrong = []
    for command in commands_of(path.read_text(encoding="utf-8")):
        if _is_a_pattern(command):
            continue
        try:
            expect_typeable(command)
        except Exception as error:  # typer's own are not public
            reason = getattr(error, "message", str(error)).splitlines()[:1]
            wrong.append(f"{command}: {reason}")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "command",
    [
        "distlab train --script train.py --backend ray --num-gpus 4 -- --epochs 3",
        "distlab train --script train.py --backend ray --address ray://head:10001",
        "distlab train --script train.py --num-nodes 2 --gpus-per-node 4",
        "distlab ddp --world-size 2 --epochs 1 --batch-size 8 --lr 0.1 --device cpu",
        "distlab ddp --global-batch-size 64 --lr-scaling linear --code mine --seed 1",
        "distlab ddp --dataset fashion-mnist --data-dir data --download --track mlflow",
        "distlab ddp --cost-per-worker-hour 2 --max-cost 1 --compare --save model.pt",
        "distlab ddp --checkpoint saved --resume --monitor --profile --code reference",
    ],
)
def test_commands_that_users_arrive_with_can_be_typed(command: str) -> None:
    expect_typeable(command)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("distlab chekc 1.4", "chekc"),
        ("distlab check 9.9", "no task is called '9.9'"),
        ("distlab sim 1.4 --ranks 4", "--ranks"),
        ("distlab sim 1.4 --net carrier-pigeon", "carrier-pigeon"),
        ("distlab explain no-such-name", "no-such-name"),
        ("distlab ddp --dataset fashion-mnist -n 4", "checkout"),
        ("pytest tests/test_phase9.py", "test_phase9"),
        ("make dmeo", "dmeo"),
    ],
)
def test_a_command_that_fails_is_found(command: str, says: str) -> None:
    with pytest.raises(Exception, match=says):
        expect_typeable(command)


def test_commands_are_found_in_prose_and_in_blocks() -> None:
    text = "Type `distlab\nstatus`.\n\n```\ndistlab watch   # a verdict\n```\n"
    assert list(commands_of(text)) == ["distlab watch", "distlab status"]


def test_a_verb_waits_only_for_what_it_needs() -> None:
    code = "import sys, distlab.cli.app; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {"torch", "distlab.curriculum", "importlib.metadata"} & {*modules}
