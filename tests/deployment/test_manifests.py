"""Each shipped manifest is valid, and a broken twin of each is refused.

`make test-manifests` runs it: kubernetes-validate is not part of the course's packages.
"""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kubernetes_validate", reason="run it with: make test-manifests")

from tests.deployment.manifests import FOLDER, documents, faults

MANIFESTS = [*sorted(FOLDER.glob("kubernetes*.yaml")), FOLDER / "rayjob.yaml"]
COMPOSE = FOLDER / "docker-compose.yaml"
SCRIPTS = [*FOLDER.glob("*.sbatch"), *FOLDER.glob("*.sh")]

JOB = ("spec", "replicatedJobs", 0, "template", "spec")
POD = ("template", "spec", "containers", 0)
WORKERS = ("spec", "rayClusterSpec", "workerGroupSpecs", 0)
TWINS = [
    # (file, kind, the path of a field, what it becomes, what is said)
    ("kubernetes", "TrainJob", ("spec", "trainer", "numProcPerNode"), "8", "'8' is"),
    ("kubernetes", "TrainJob", ("spec", "runtimeRef"), {"kind": "TrainingRuntime"},
     "name"),
    ("kubernetes", "TrainJob", ("spec", "trainer", "env"),
     [{"name": "PET_MASTER_ADDR"}], "PET_MASTER_ADDR"),
    ("kubernetes", "TrainJob", ("metadata", "name"), "DistLab", "DistLab"),
    ("kubernetes", "TrainJob", ("spec", "trainer", "numNode"), 2, "numNode"),
    ("kubernetes", "TrainingRuntime", ("spec", "mlPolicy", "torch", "elasticPolicy"),
     {"minNodes": 1}, "elasticPolicy"),
    ("kubernetes", "TrainingRuntime", ("spec", "mlPolicy", "torch", "numProcPerNode"),
     8, "numProcPerNode"),
    ("kubernetes", "TrainingRuntime", ("spec", "template", *JOB, "backofLimit"), 0,
     "backofLimit"),
    ("kubernetes_jobset", "JobSet", ("spec", "failurePolicy", "restartStrategy"),
     "BlockingRestart", "BlockingRestart"),
    ("kubernetes_jobset", "JobSet", ("spec", "failurePolicy", "maxRestart"), 3,
     "maxRestart"),
    ("kubernetes_jobset", "JobSet", (*JOB, "parallelism"), "two", "two"),
    ("kubernetes_jobset", "JobSet", (*JOB, *POD, "volumeMount"), [], "volumeMount"),
    ("kubernetes_indexed_job", "Job", ("spec", "completionsMode"), "Indexed",
     "completionsMode"),
    ("kubernetes_indexed_job", "Job", ("spec", *POD, "args"), "--nnodes=2", "--nnodes"),
    ("kubernetes_indexed_job", "Service", ("spec", "clusterIp"), "None", "clusterIp"),
    ("rayjob", "RayJob", (*WORKERS, "rayStartParams"), {"num-cpus": 0}, "0 is not"),
    ("rayjob", "RayJob", ("spec", "submissionMode"), "K8sJob", "K8sJob"),
    ("rayjob", "RayJob", (*WORKERS, *POD, "ports"), 6379, "6379"),
]  # fmt: skip


def named(name: str, kind: str) -> dict[str, Any]:
    found = documents(FOLDER / f"{name}.yaml")
    return next(document for document in found if document["kind"] == kind)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_shipped_manifest_is_valid(path: Path) -> None:
    assert [line for document in documents(path) for line in faults(document)] == []


@pytest.mark.parametrize(
    ("name", "kind", "where", "value", "said"),
    TWINS,
    ids=[f"{twin[1]}-{twin[2][-1]}" for twin in TWINS],
)
def test_a_broken_twin_is_refused(
    name: str, kind: str, where: tuple[Any, ...], value: Any, said: str
) -> None:
    document = copy.deepcopy(named(name, kind))
    inside = document
    for key in where[:-1]:
        inside = inside[key]
    inside[where[-1]] = value
    found = faults(document)
    assert found
    assert said in "\n".join(found)


def test_every_kind_has_a_broken_twin() -> None:
    kinds = {doc["kind"] for path in MANIFESTS for doc in documents(path)}
    assert kinds == {kind for _, kind, *_ in TWINS}


def test_all_nodes_of_a_job_meet_where_one_of_them_is() -> None:
    jobset = named("kubernetes_jobset", "JobSet")
    job = jobset["spec"]["replicatedJobs"][0]
    subdomain = jobset["spec"]["network"]["subdomain"]
    first = f"{jobset['metadata']['name']}-{job['name']}-0-0.{subdomain}"
    args = job["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--rdzv-endpoint={first}:29400" in args
    service = named("kubernetes_indexed_job", "Service")
    indexed = named("kubernetes_indexed_job", "Job")
    spec = indexed["spec"]["template"]["spec"]
    assert spec["subdomain"] == service["metadata"]["name"]
    first = f"{indexed['metadata']['name']}-0.{spec['subdomain']}"
    assert f"--rdzv-endpoint={first}:29400" in spec["containers"][0]["args"]
    for job_spec in (indexed["spec"], job["template"]["spec"]):
        assert job_spec["parallelism"] == job_spec["completions"] == 2


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_bash_and_its_options_are_slurms(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    options = [line for line in lines if "SBATCH" in line]
    # SLURM takes "# SBATCH" for a comment, and reads no option after a command.
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in options)
    first = next(i for i, line in enumerate(lines) if line and line[0] != "#")
    assert all(line not in options for line in lines[first:])


# ── compose ─────────────────────────────────────────────────────────────────────────


def read_by_compose(path: Path) -> subprocess.CompletedProcess[str]:
    command = ["docker-compose"]
    if shutil.which("docker-compose") is None:
        command = ["docker", "compose"]
        probe = [*command, "version"]
        if not shutil.which("docker") or subprocess.run(probe).returncode:
            pytest.skip("no docker-compose on this machine")
    order = [*command, "-f", str(path), "config"]
    return subprocess.run(order, capture_output=True, text=True)


def test_compose_reads_its_file_and_refuses_a_broken_twin(tmp_path: Path) -> None:
    done = read_by_compose(COMPOSE)
    assert done.returncode == 0, done.stderr
    read = yaml.safe_load(done.stdout)["services"]
    assert set(read) == {"node0", "node1"}
    for service in read.values():
        assert "--master-addr=node0" in service["entrypoint"]
        assert service["init"] is True
    twin = tmp_path / "docker-compose.yaml"
    twin.write_text(COMPOSE.read_text().replace("shm_size:", "shmsize:"))
    done = read_by_compose(twin)
    assert done.returncode != 0
    assert "shmsize" in done.stderr
