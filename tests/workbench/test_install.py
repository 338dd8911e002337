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
from distlab.install import CPU_INDEX, PATIENCE, wants_cpu_build
from distlab.set_up import set_up

WANTED = "torch>=2.11,<2.15"
SCRIPT = Path(install.__file__)

LAPTOP = {
    "wish": "auto",
    "system": "Linux",
    "machine": "x86_64",
    "has_gpu": False,
    "installed": False,
}


@pytest.mark.parametrize(
    ("different", "is_cpu"),
    [
        ({}, True),
        ({"machine": "aarch64"}, True),
        ({"machine": "riscv64"}, False),
        ({"has_gpu": True}, False),
        ({"system": "Darwin", "machine": "arm64"}, False),
        ({"system": "Windows", "machine": "AMD64"}, False),
        ({"wish": "cpu", "has_gpu": True}, True),
        ({"wish": "cpu", "system": "Darwin"}, True),
        ({"wish": "default"}, False),
        ({"installed": True}, False),
        ({"installed": True, "wish": "cpu"}, False),
    ],
)
def test_choice(different: dict[str, object], is_cpu: bool) -> None:
    given = LAPTOP | different
    assert wants_cpu_build(**given) is is_cpu  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "is_fitting"),
    [
        ("2.11", True),
        ("2.13.9+cu128", True),
        ("2.10.9", False),
        ("2.15.0+cpu", False),
        ("2.12.0a0+git1234", False),  # a pre-release
    ],
)
def test_range(version: str, is_fitting: bool) -> None:
    assert install.fits(version, WANTED) is is_fitting


def test_versions_can_be_compared_where_distutils_is_imported_already() -> None:
    program = f"""\
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import setuptools, distutils.core  # Python 3.12 has no distutils
    except ImportError:
        pass
from distlab import install
assert install.fits("2.12", {WANTED!r})
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


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

    def __init__(self, *results: tuple[int, str]) -> None:
        self.results = list(results)
        self.asked: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> tuple[int, str]:
        self.asked.append(list(arguments))
        return self.results.pop(0)


def do(is_cpu: bool, *results: tuple[int, str]) -> tuple[bool, list[list[str]]]:
    pip = FakePip(*results)
    target = install.target(["dev"], clone=True)
    is_done = install.install(is_cpu, wanted=WANTED, target=target, pip=pip)
    assert not pip.results
    return is_done, pip.asked


LISTED = "Available versions: 2.15.0+cpu, 2.14.1, 2.13.0+cpu, 2.12.1+cpu, 2.12.1"
DISTLAB = ["install", "-qq", "-e", ".[course,dev]"]
INDEX = [*CPU_INDEX, *PATIENCE]


def test_the_newest_cpu_build_that_fits_comes_first() -> None:
    is_done, asked = do(True, (0, LISTED), (0, ""), (0, ""))
    assert is_done
    assert asked == [
        ["index", "versions", "torch", *INDEX],
        ["install", "--no-deps", "torch==2.13.0+cpu", *INDEX],
        DISTLAB,
    ]


def test_otherwise_pip_is_left_alone() -> None:
    assert do(False, (0, "")) == (True, [DISTLAB])


@pytest.mark.parametrize("listed", [(1, ""), (0, "torch (2.14.1)")])
def test_without_a_cpu_build_pip_decides(
    listed: tuple[int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    is_done, asked = do(True, listed, (0, ""))
    assert is_done
    assert asked[1:] == [DISTLAB]
    assert "pip" in capsys.readouterr().out


def test_a_failure_is_not_answered_with_a_larger_download() -> None:
    assert not do(True, (0, LISTED), (1, ""))[0]
    assert not do(False, (1, ""))[0]


@pytest.mark.parametrize("writes", [False, True])
def test_pip_failed_before_or_after_it_wrote(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    writes: bool,
) -> None:
    def pip(arguments: Sequence[str]) -> tuple[int, str]:
        if writes:
            os.utime(tmp_path, (0, 0))
        return 1, ""

    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(install, "real_pip", pip)
    code = install.main(["--torch", "default"])
    assert code == (install.HALF_DONE if writes else install.REFUSED)
    assert capsys.readouterr().out


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
