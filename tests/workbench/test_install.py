"""The set-up decides rightly, and says in one sentence what went wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from distlab import install
from distlab.install import CPU_INDEX, PipResult, TorchPlan, choose_torch
from distlab.set_up import set_up
from tests.workbench.golden import Golden

WANTED = "torch>=2.11,<2.15"
SCRIPT = Path(install.__file__)

LAPTOP = {
    "wish": "auto",
    "system": "Linux",
    "machine": "x86_64",
    "has_gpu": False,
    "sources": (),
    "installed": None,
    "wanted": WANTED,
}


@pytest.mark.parametrize(
    ("different", "torch"),
    [
        ({}, "cpu"),
        ({"machine": "aarch64"}, "cpu"),
        ({"machine": "riscv64"}, "pip"),
        ({"has_gpu": True}, "pip"),
        ({"sources": ["find-links"]}, "small"),
        ({"sources": ["find-links"], "system": "Darwin"}, "pip"),
        ({"sources": ["extra-index-url"], "has_gpu": True}, "pip"),
        ({"system": "Darwin", "machine": "arm64"}, "pip"),
        ({"system": "Windows", "machine": "AMD64"}, "pip"),
        ({"wish": "cpu", "has_gpu": True}, "cpu"),
        ({"wish": "cpu", "sources": ["index-url"]}, "cpu"),
        ({"wish": "default"}, "pip"),
        ({"installed": "2.13.0+cpu"}, "keep"),
        ({"installed": "2.13.0+cpu", "wish": "default"}, "keep"),
        ({"installed": "2.10.1"}, "cpu"),
        ({"installed": "2.15.0", "has_gpu": True}, "pip"),
    ],
)
def test_choice(different: dict[str, object], torch: str) -> None:
    assert choose_torch(**(LAPTOP | different)).torch == torch  # type: ignore[arg-type]


def test_a_plan_says_which_settings_won() -> None:
    plan = choose_torch(**(LAPTOP | {"sources": ["find-links"]}))  # type: ignore[arg-type]
    assert "find-links" in plan.why


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.11", True),
        ("2.11.0", True),
        ("2.13.9+cu128", True),
        ("2.10.9", False),
        ("2.14.1+cu130", True),
        ("2.15", False),
        ("2.15.0+cpu", False),
        ("2.12.0a0+git1234", False),  # pip judges pre-releases, we do not
        ("unknown", False),
    ],
)
def test_range(version: str, fits: bool) -> None:
    assert install.satisfies(version, WANTED) is fits


def test_a_requirement_without_bounds_is_left_to_pip() -> None:
    assert not install.satisfies("2.13.0", "torch")


@pytest.mark.parametrize(
    ("config", "sources"),
    [
        ("", []),
        ("global.timeout='60'\n:env:.disable-pip-version-check='1'", []),
        (":env:.find-links='/wheels'", ["find-links"]),
        (":env:.find-links=''", []),
        ("global.index-url='file:///a'\n:env:.index-url='file:///b'", ["index-url"]),
        ("install.extra_index_url='file:///a file:///b'", ["extra-index-url"]),
        ("global.no-index='true'", ["no-index"]),
        ("global.no-index='false'", []),
        ("download.index-url='file:///a'", []),  # of another command than install
        ("nonsense", []),
    ],
)
def test_pip_settings_are_read(config: str, sources: list[str]) -> None:
    assert install.wheel_sources(config) == sources


def test_a_wish_in_the_environment_counts_unless_a_flag_says_more() -> None:
    assert install.read_wish("auto", {}) == "auto"
    assert install.read_wish("auto", {"DISTLAB_TORCH": "cpu"}) == "cpu"
    assert install.read_wish("default", {"DISTLAB_TORCH": "cpu"}) == "default"
    with pytest.raises(install.InstallError, match=r"DISTLAB_TORCH.*'rocm'"):
        install.read_wish("auto", {"DISTLAB_TORCH": "rocm"})


def test_each_trace_of_a_gpu_is_enough() -> None:
    def nowhere(_: str) -> None:
        return None

    assert not install.has_nvidia_gpu(exists=lambda _: False, which=nowhere)
    assert install.has_nvidia_gpu(exists=lambda p: p == "/dev/nvidia0", which=nowhere)
    assert install.has_nvidia_gpu(exists=lambda _: False, which=lambda name: name)


def test_the_range_is_read_from_pyproject(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\ndependencies = ["torch-else", "torch>=9,<10", "rich"]')
    assert install.torch_requirement(file) == "torch>=9,<10"
    file.write_text("[project]\ndependencies = []")
    with pytest.raises(install.InstallError, match=r"pyproject\.toml"):
        install.torch_requirement(file)


def test_a_wheel_says_what_it_needs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["rich", "torch>=9"])
    assert install.torch_requirement(tmp_path / "pyproject.toml") == "torch>=9"
    assert install.target(["notebook"], clone=False) == ["distlab[notebook]"]


# ── the environment of a clone ──────────────────────────────────────────────────────


class Commands:
    """Plays `python -m venv` and install.py, whose exit codes it is given."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.made, self.installed = list(codes), 0, [""]

    def __call__(self, command: Sequence[str]) -> tuple[int, str]:
        if "venv" in command:
            self.made += 1
            folder = Path(command[-1])
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "python").touch()
            return 0, ""
        self.installed = list(command[2:])
        return self.codes.pop(0), ""


def test_setup_starts_over_unless_the_environment_is_whole(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()

    def made(*codes: int) -> tuple[int, int]:
        commands = Commands(*codes)
        code = set_up(["--extras", "dev"], tmp_path, commands)
        assert commands.installed == ["--extras", "dev"]
        return code, commands.made

    assert made(install.HALF_DONE) == (install.HALF_DONE, 1)
    assert made(install.OK) == (install.OK, 1)  # what was half done is thrown away
    assert made(install.REFUSED) == (install.REFUSED, 0)  # pip has changed nothing
    assert made(install.OK) == (install.OK, 0)
    (tmp_path / ".venv" / ".ready").write_text("/somewhere/else\n")  # moved
    assert made(install.INTERRUPTED) == (install.INTERRUPTED, 1)
    assert made(install.OK) == (install.OK, 1)
    # The Makefile compares it with the folder.
    assert (tmp_path / ".venv" / ".ready").read_text() == f"{tmp_path}\n"


def test_an_interrupted_setup_blames_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").touch()
    code = set_up((), tmp_path, lambda _: (install.INTERRUPTED, ""))
    assert code == install.INTERRUPTED
    assert "apt install" not in capsys.readouterr().out


def test_a_setup_that_only_shows_makes_no_environment(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    assert set_up(["--dry-run"], tmp_path, Commands()) == install.OK
    assert not (tmp_path / ".venv").exists()


def test_setup_finds_the_python_of_windows(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    used: list[str] = []

    def run(command: Sequence[str]) -> tuple[int, str]:
        (tmp_path / ".venv").mkdir(exist_ok=True)
        used.append(command[0])
        return 0, ""

    assert set_up((), tmp_path, run, windows=True) == 0
    assert used[-1] == str(tmp_path / ".venv" / "Scripts" / "python.exe")


def test_setup_needs_nothing_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "distlab", "setup", "--help"],
        cwd=SCRIPT.parents[1],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--torch" in done.stdout


class FakePip:
    """Answers each run with the next result and keeps what it was asked."""

    def __init__(self, *results: PipResult) -> None:
        self.results = list(results)
        self.asked: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> PipResult:
        self.asked.append(list(arguments))
        return self.results.pop(0)


def do(plan: str, pip: FakePip, extras: Sequence[str] = ()) -> tuple[int, list[str]]:
    said: list[str] = []
    code = install.install(
        TorchPlan(plan, "because"),
        wanted=WANTED,
        target=install.target(extras, clone=True),
        pip=pip,
        say=said.append,
    )
    return code, said


def test_the_cpu_build_comes_first_and_from_its_index() -> None:
    pip = FakePip(PipResult(0), PipResult(0))
    code, said = do("cpu", pip)
    assert code == 0
    assert pip.asked[0][:4] == ["install", WANTED, "--index-url", CPU_INDEX]
    assert pip.asked[1] == ["install", "-e", ".[course]"]
    assert len(said) == 2  # one line before each step


@pytest.mark.parametrize("plan", ["pip", "keep"])
def test_otherwise_pip_is_left_alone(plan: str) -> None:
    pip = FakePip(PipResult(0))
    code, _ = do(plan, pip, ["dev"])
    assert code == 0
    assert pip.asked == [["install", "-e", ".[course,dev]"]]


UNREACHABLE = (
    "WARNING: Retrying (Retry(total=1)) after connection broken by"
    " 'NewConnectionError: [Errno -3] Temporary failure in name resolution'",
    "ERROR: Could not find a version that satisfies the requirement torch",
    "ERROR: No matching distribution found for torch<2.15,>=2.11",
)


@pytest.mark.parametrize("lines", [UNREACHABLE, UNREACHABLE[-1:]])
def test_an_index_that_does_not_help_is_said_and_pip_decides(
    lines: tuple[str, ...],
) -> None:
    pip = FakePip(PipResult(1, lines), PipResult(1), PipResult(0))
    code, said = do("cpu", pip)
    assert code == 0
    assert pip.asked[1:] == [
        ["index", "versions", "torch"],
        ["install", "-e", ".[course]"],
    ]
    assert sum(CPU_INDEX in line for line in said) == 1


LISTED = "Available versions: 2.15.0+cpu, 2.14.1, 2.13.0+cpu, 2.12.1+cpu, 2.12.1"


@pytest.mark.parametrize("plan", ["small", "cpu"])
def test_a_small_build_among_pips_own_sources_is_taken(plan: str) -> None:
    first = [PipResult(1, UNREACHABLE)] if plan == "cpu" else []
    pip = FakePip(*first, PipResult(0, [LISTED]), PipResult(0), PipResult(0))
    code, _ = do(plan, pip)
    assert code == 0
    assert pip.asked[-2:] == [
        ["install", "torch==2.13.0+cpu"],
        ["install", "-e", ".[course]"],
    ]


@pytest.mark.parametrize("listed", [PipResult(1), PipResult(0, ["torch (2.14.1)"])])
def test_without_a_small_build_pip_decides(listed: PipResult) -> None:
    pip = FakePip(listed, PipResult(0))
    code, _ = do("small", pip)
    assert code == 0
    assert pip.asked[-1] == ["install", "-e", ".[course]"]


def test_a_small_build_that_fails_ends_the_installation() -> None:
    pip = FakePip(PipResult(0, [LISTED]), PipResult(1, ["No space left on device"]))
    code, _ = do("small", pip)
    assert code == install.HALF_DONE


def test_a_full_disk_is_not_answered_with_a_larger_download() -> None:
    pip = FakePip(PipResult(1, ["ERROR: [Errno 28] No space left on device"]))
    code, said = do("cpu", pip)
    assert code == install.HALF_DONE
    assert len(pip.asked) == 1
    assert "pip:" not in said[-1]


FAILURES: list[tuple[Sequence[str], int]] = [
    (UNREACHABLE, install.REFUSED),
    (UNREACHABLE[-1:], install.REFUSED),
    (["error: externally-managed-environment"], install.REFUSED),
    (["ERROR: [Errno 28] No space left on device"], install.HALF_DONE),
    (["something new"], install.HALF_DONE),
    ([], install.HALF_DONE),
]


def test_a_failure_shows_pip_and_ends_in_one_sentence(golden: Golden) -> None:
    told = []
    for lines, code in FAILURES:
        result, said = do("pip", FakePip(PipResult(1, lines)))
        assert result == code
        assert [line for line in said if "pip:" in line] == [
            f"  pip: {line}" for line in lines
        ]
        assert "pip:" not in said[-1]
        told += [*said, ""]
    for lines in (UNREACHABLE, UNREACHABLE[-1:]):
        told += [
            *do("cpu", FakePip(PipResult(1, lines), PipResult(1), PipResult(0)))[1],
            "",
        ]
    golden("install/failures", "\n".join(told))


def test_only_the_end_of_long_output_is_shown() -> None:
    lines = [str(number) for number in range(100)]
    _, said = do("pip", FakePip(PipResult(1, lines)))
    assert "  pip: 99" in said
    assert "  pip: 50" not in said


def script(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the file as the Makefile does: as a script, by path."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_shows_what_it_would_do() -> None:
    done = script("--dry-run", "--extras", "dev")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '-e ".[course,dev]"' in done.stdout
    assert done.stderr == ""


def test_the_script_answers_a_bad_wish_without_a_traceback() -> None:
    done = script("--dry-run", DISTLAB_TORCH="rocm")
    assert done.returncode == install.USAGE
    assert {"rocm", "auto", "cpu", "default"} <= set(re.findall(r"\w+", done.stdout))
    assert done.stderr == ""


ACTIVITIES = [
    (["Collecting torch<2.15,>=2.11"], "torch"),
    (
        ["Collecting a", "  Downloading torch-2.13.0-cp312-none.whl (200 MB)"],
        "torch",
    ),
    (["Collecting numpy (from distlab)", "   ━━━━ 5.3/20.1 MB"], "numpy"),
    (["  Downloading https://there/a/pillow-1.0.whl"], "pillow"),
    (["Building wheel for nbval (pyproject.toml): started"], "nbval"),
    (["Collecting a", "Installing collected packages: a, b, torch"], "3"),
]


def test_what_pip_does_is_read_from_its_lines(golden: Golden) -> None:
    for nothing in ([], ["Looking in links: wheels"]):
        assert install.activity(nothing) == ""
    told = []
    for lines, what in ACTIVITIES:
        said = install.activity(lines)
        assert said.split()[1] == what
        told.append(said)
    golden("install/activity", "\n".join(told))


# ── containers ──────────────────────────────────────────────────────────────────────


def test_containers_call_the_set_up_as_it_is() -> None:
    """Nobody builds them here: this only reads what they would do."""
    with (install.ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    folder = install.ROOT / ".devcontainer"
    dev = json.loads((folder / "devcontainer.json").read_text(encoding="utf-8"))
    settings = dev["customizations"]["vscode"]["settings"]
    assert settings["python.defaultInterpreterPath"] == ".venv/bin/python"
    files = [folder / dev["build"]["dockerfile"], install.ROOT / "Dockerfile"]
    texts = [path.read_text(encoding="utf-8") for path in files]
    for text in texts:
        python = re.findall(r"^FROM python:(\d+)\.(\d+)", text, re.M)
        assert [tuple(map(int, found)) >= install.OLDEST_PYTHON for found in python]
    commands = "\n".join([dev["postCreateCommand"], *texts])
    calls = re.findall(r"python -m distlab setup([^\\\n]*)", commands)
    assert len(calls) == 2
    for call in calls:
        options = install._parse(call.split())
        assert {*options.extras.split(",")} - {""} <= {*extras}


def test_the_core_and_the_notebooks_do_without_scikit_learn() -> None:
    with (install.ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    needs = [*project["dependencies"], *extras["notebook"], *extras["course"]]
    assert not [need for need in needs if need.startswith(("scikit", "scipy"))]
