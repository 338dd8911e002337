"""`distlab explain` with an error of torch: known texts, several, and unknown ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.cli.explain import explain
from distlab.curriculum import load_curriculum
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.curriculum.torch_errors import (
    COMMANDS,
    TorchError,
    find_torch_errors,
    read_torch_errors,
)
from tests.workbench.course import ROOT
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

Capture = pytest.CaptureFixture[str]
ERRORS = read_torch_errors()


@pytest.mark.parametrize("error", ERRORS, ids=[error.name for error in ERRORS])
def test_an_entry_is_complete_and_finds_its_own_example(
    error: TorchError, capsys: Capture
) -> None:
    assert find_torch_errors(error.example)[0] is error
    wrapped = "\n[rank0]:   ".join(error.example.split())
    assert error in find_torch_errors(wrapped.replace("[rank0]:", "")), "wrapped"
    assert explain(error.example) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{error.name}: {error.title}\n")
    assert all(text.strip() for text in (error.means, error.why, error.look))
    numbers = {task.number for task in load_curriculum(ROOT).tasks}
    assert error.see
    assert set(error.see) <= numbers | set(read_misconceptions())


def test_there_are_many_and_most_were_provoked() -> None:
    assert len(ERRORS) >= 15
    assert sum(error.provoked for error in ERRORS) >= 15


# The texts that torch and the tools for hangs print, and the entry for each.
TEXTS = {
    "Detected mismatch between collectives on ranks. Rank 2 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=4, OpType=ALLREDUCE": "different-collectives",
    "use_libuv was requested but PyTorch was built without libuv": "no-libuv-here",
    "use_libuv was requested but PyTorch was build without libuv": "no-libuv-here",
    "makeDeviceForInterface(): unsupported gloo device": "gloo-device",
    "SyncBatchNorm expected input tensor to be on GPU": "sync-batch-norm-on-cpu",
    "SyncBatchNorm layers only work with GPU modules": "sync-batch-norm-on-cpu",
    "sampler option is mutually exclusive with shuffle": "shuffle-twice",
    "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, "
    "and drop_last": "shuffle-twice",
    "DataLoader with IterableDataset: expected unspecified sampler option, but got "
    "sampler=<x>": "shuffle-twice",
    "Connection closed by peer [127.0.0.1]:48422": "connection-closed",
    "Application timeout caused pair closure": "pair-closed-after-a-timeout",
    "Ranks 1, 2 failed to pass monitoredBarrier in 2000 ms": "monitored-barrier",
    "Rank 1 successfully reached monitoredBarrier, but received errors while waiting "
    "for send/recv from rank 0. Please check rank 0 logs": "monitored-barrier",
    "[PG ID 0 PG GUID 0(default_pg) Rank 0] Timeout at NCCL work: 5, last enqueued "
    "NCCL work: 5, last completed NCCL work: 4.": "nccl-watchdog",
    "Received a dump signal due to a collective timeout from  rank 7 and we will try "
    "our best to dump the debug info.": "nccl-watchdog",
    "Collective WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=3, Timeout(ms)=1800000) "
    "raised the following async exception: NCCL error: remote process exited or there "
    "was a network error, NCCL version 2.28.9": "nccl-remote-ended",
    "failure detected by watchdog at work sequence id: 4 PG status: last enqueued "
    "work: 4, last completed work: 3": "nccl-watchdog-ends-the-process",
    "ProcessGroupNCCL's watchdog got stuck for 480 seconds": "nccl-watchdog-stuck",
    "Expected to have finished reduction in the prior iteration": "unused-parameters",
    "DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1 "
    "has inconsistent 4 params.": "parameters-differ-in-shape",
    "Error code: 500 Message: Exception: KeyError(('0', 0)).": "dumps-of-gloo",
    "Failed to suspend process Reason: EPERM: Operation not permitted": (
        "py-spy-not-allowed"
    ),
}


@pytest.mark.parametrize("text", TEXTS, ids=TEXTS.values())
def test_a_text_that_a_tool_prints(text: str) -> None:
    assert [error.name for error in find_torch_errors(text)] == [TEXTS[text]]


def test_an_entry_about_a_hang_names_the_command_that_finds_it(
    capsys: Capture,
) -> None:
    runs = {error.name: error.run for error in ERRORS}
    assert all(verb in COMMANDS for verbs in runs.values() for verb in verbs)
    for name in (
        "different-collectives",
        "connection-closed",
        "monitored-barrier",
        "nccl-watchdog",
        "timed-out-in-recv",
    ):
        assert "run" in runs[name]
        explain(name)
        assert COMMANDS["run"][0] in capsys.readouterr().out
    assert runs["dumps-missing"] == runs["dumps-of-gloo"] == ("explain-hang",)
    assert runs["unused-parameters"] == ("audit",)
    assert runs["shuffle-twice"] == ()


def test_of_several_the_cause_comes_first(capsys: Capture) -> None:
    log = """
    [rank1]: RuntimeError: Connection reset by peer
    terminate called: op.preamble.length <= op.nbytes. 8 vs 4
    ChildFailedError: Root Cause (first observed failure)
    """
    explain(log)
    said = capsys.readouterr().out
    assert said.startswith("message-larger-than-its-tensor")
    _, *also = find_torch_errors(log)
    assert len(also) == 2
    assert all(error.name in said or error.title in said for error in also)


def test_an_unknown_text_is_one_honest_sentence(golden: Golden) -> None:
    texts = (
        "my dog ate the gradients",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        "nosuchslug",
    )
    told = [refusal(ValueError, explain, text) for text in texts]
    assert ["'nosuchslug'" in one for one in told] == [False, False, True]
    golden("cli/explain-unknown", "\n".join(told))


def test_a_log_can_be_piped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff\x00 " + ERRORS[0].example.encode())

    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    environment["DISTLAB_STATE"] = str(tmp_path)

    def run(text: bytes) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "distlab", "explain"]
        return subprocess.run(
            command,
            input=text,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            timeout=60,
            check=False,
        )

    done = run(log.read_bytes())
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(ERRORS[0].name.encode())
    done = run(b"nothing of ours")
    assert (done.returncode, done.stdout) == (2, b"")
    assert re.fullmatch(rb"distlab: [^\n]+\n", done.stderr)
    assert b"explain --all" in run(b"").stdout
