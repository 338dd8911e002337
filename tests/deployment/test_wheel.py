"""The wheel in an environment without the clone: its commands, and the whole course.

The environment borrows the other libraries, torch above all, from the one we run in.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PHASE_1 = "phase1_data_parallel"
HANGS = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()  # without it, torch may abort while the process ends
"""
RUNS = HANGS.replace("dist.get_rank() == 0", "False")
FILL = """\
from distlab.curriculum import load_curriculum
course = load_curriculum()
for name in ("collectives", "monitoring", "drill"):
    unit = course.units[name]
    text = unit.solution(course.root).read_text(encoding="utf-8")
    unit.template(course.root).write_text(text, encoding="utf-8")
"""
CHECK = """\
import sys
!{sys.executable} -m distlab check 1.1 1.2 1.3
"""
PYTEST = """\
import pytest
import torch.distributed as dist

@pytest.mark.ranks(3)
def test_rank():
    assert dist.get_world_size() == 3
"""


class Environment:
    """An environment without distlab, which borrows all other libraries from ours."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.python = folder / "bin" / "python"
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        said = subprocess.check_output([self.python, "-c", code], text=True)
        self.libraries = Path(said.strip())
        # The .pth file that points to the clone isn't read in a folder added like this.
        places = [path for path in sys.path if Path(path).name == "site-packages"]
        borrowed = self.libraries / "borrowed.pth"
        borrowed.write_text("\n".join(places), encoding="utf-8")


class Installed(Environment):
    """distlab in an environment of its own; commands run in a folder elsewhere."""

    def __init__(self, folder: Path) -> None:
        began = time.monotonic()
        run([sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT], folder)
        (self.sdist,) = (folder / "dist").glob("*.tar.gz")
        (self.wheel,) = (folder / "dist").glob("*.whl")  # built from the sdist
        built = time.monotonic()
        super().__init__(folder / "env")
        pip = [self.python, "-m", "pip", "install", "--no-deps", "--no-index"]
        run([*pip, self.wheel], folder)
        self.folder = folder / "elsewhere"
        self.folder.mkdir()
        print(
            f"\nwheel {self.wheel.stat().st_size / 2**20:.1f} MiB, sdist "
            f"{self.sdist.stat().st_size / 2**20:.1f} MiB, built in "
            f"{built - began:.0f} s, installed in {time.monotonic() - built:.0f} s"
        )

    def distlab(self, *arguments: str, into: str = "") -> tuple[int, str]:
        command = [self.python.with_name("distlab"), *arguments]
        return ended(command, self.folder / into)

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text, encoding="utf-8")
        return name


def run(command: list[str | Path], folder: Path) -> None:
    code, said = ended(command, folder)
    assert code == 0, said


def ended(command: list[str | Path], folder: Path) -> tuple[int, str]:
    """Exit code and output, without our own settings and without the clone."""
    ours = ("PYTHONPATH", "DISTLAB", "PYTEST")
    kept = {name: v for name, v in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_all_data_and_nobody_s_templates(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    files = tracked.strip("\0").split("\0")
    own = {name for name in files if name.startswith("distlab/")}
    assert own <= names
    course = re.compile(r"(phase\d_\w+|solutions|tests/mutants)/")
    wanted = {f"distlab/course/{name}" for name in files if course.match(name)}
    assert {name for name in wanted if "/template_" not in name} <= names
    assert not [name for name in names if "/template_" in name]


def test_distlab_comes_from_the_wheel(installed: Installed) -> None:
    code = "import distlab; print(distlab.__file__)"
    where = ended([installed.python, "-c", code], installed.folder)[1]
    assert Path(where.strip()).is_relative_to(installed.libraries)


def test_a_script_that_hangs(installed: Installed) -> None:
    script = installed.write("hangs.py", HANGS)
    code, said = installed.distlab("run", "-n", "2", script)
    assert code == 1
    assert {"hangs.py:6", "hangs.py:7"} <= set(re.findall(r"hangs\.py:\d+", said))


def test_a_script_that_runs(installed: Installed) -> None:
    script = installed.write("runs.py", RUNS)
    for arguments in (["run", "-n", "2"], ["sim", "-n", "8"], ["audit"]):
        code, said = installed.distlab(*arguments, script)
        assert code == 0, said
    launch = [installed.python, "-m", "distlab.launch", "--nproc-per-node=2", script]
    code, said = ended(launch, installed.folder)
    assert code == 0, said


def test_explanations_and_plans(installed: Installed) -> None:
    plan = ["plan", "llama-70b", "--gpus", "64"]
    for arguments in (["explain", "ring-of-sends"], ["explain-hang", "--help"], plan):
        code, said = installed.distlab(*arguments)
        assert code == 0, said


def test_the_plugin_of_pytest(installed: Installed) -> None:
    test = installed.write("test_ranks.py", PYTEST)
    code, said = ended([installed.python, "-m", "pytest", test], installed.folder)
    assert code == 0, said


def test_what_only_a_clone_has(installed: Installed) -> None:
    new_task = ["new-task", "1.99", "collectives.example"]
    for arguments in (["bench", "sim"], ["mutants"], ["templates"], new_task):
        code, said = installed.distlab(*arguments)
        assert code == 2
        assert len(said.strip().splitlines()) == 1
    assert installed.distlab("check", "1.1")[0] == 2  # no course here
    installed.write("notes.txt", "")
    assert installed.distlab("start", "--only-fetch")[0] == 2  # not an empty folder


def test_a_course_without_a_clone(installed: Installed) -> None:
    (installed.folder / "course").mkdir()
    code, said = installed.distlab("start", "--only-fetch", into="course")
    assert code == 0, said
    assert installed.distlab("check", "1.1", into="course")[0] == 10  # not started
    course = installed.folder / "course"
    run([installed.python, "-c", FILL], course)
    code, said = installed.distlab(
        *("check", "1.1", "1.2", "1.3", "4.12", "4.19"), into="course"
    )
    assert code == 0, said
    front = ["-m", "pytest", "tests/test_phase1.py", "-k", "exchange"]
    code, said = ended([installed.python, *front], course)
    assert code == 0, said
    for arguments in (["status"], ["hint", "1.4"], ["diff", "1.1"], ["update"]):
        assert installed.distlab(*arguments, into="course")[0] == 0


def test_a_notebook_on_its_own(installed: Installed, tmp_path: Path) -> None:
    """As in Colab: nothing is installed, and the wheel lies beside the notebook."""
    env = Environment(tmp_path / "env")
    notebook = json.loads((ROOT / PHASE_1 / "walkthrough.ipynb").read_text("utf-8"))
    first = next(c for c in notebook["cells"] if c["cell_type"] == "code")
    solve = {**first, "id": "solve", "source": FILL}
    check = {**first, "id": "check", "source": CHECK}
    notebook["cells"] = [first, solve, check, *notebook["cells"]]
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    shutil.copy(installed.wheel, folder)
    (folder / "lab.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    began = time.monotonic()
    convert = ["-m", "nbconvert", "--execute", "--to=notebook", "--output=run.ipynb"]
    run([env.python, *convert, "lab.ipynb"], folder)
    cells = json.loads((folder / "run.ipynb").read_text("utf-8"))["cells"]
    print(f"\nthe notebook ran in {time.monotonic() - began:.0f} s")
    said = "".join("".join(output["text"]) for output in cells[2]["outputs"])
    assert re.findall(r"(1\.\d) PASS", said) == ["1.1", "1.2", "1.3"]
    assert (folder / "distlab-course" / PHASE_1 / "template_collectives.py").is_file()
