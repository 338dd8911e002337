"""The scripts that hang, in torch's own words.

torchrun with what torch has for a hang on the CPU, and a timeout that we shorten from
30 minutes to ten seconds. Each script runs twice: once with TORCH_DISTRIBUTED_DEBUG set
to DETAIL, and once with the flight recorder, which each rank dumps every second and at
its end. `fr_trace` reads the last dumps.

Run as a module, this file is that rank: it shortens the timeout and runs the script.
"""

from __future__ import annotations

import re
import runpy
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks._autopsy_runs import Ended, run
from tests.corpora.autopsy_scripts import Script

TIMEOUT_S = 10
_LIMIT_S = 120.0
_DUMP_EVERY_S = 1.0
Line = dict[str, Any]

# The first that matches is what torch said.
_SAYINGS = (
    ("mismatch", re.compile(r"Detected mismatch between collectives")),
    ("monitored", re.compile(r"failed to pass monitoredBarrier")),
    ("same model", re.compile(r"DDP expects same model|verify_params")),
    ("gloo", re.compile(r"enforce fail at|EnforceNotMet")),
    ("timeout", re.compile(r"Timed out waiting|[Tt]imeout")),
    ("closed", re.compile(r"Connection closed by peer|Connection reset")),
)
_TRACED = re.compile(r"Culprit rank|missing ranks: ")
_RANKS = re.compile(r"\b[Rr]anks? (\d+(?:, \d+)*)")
_FRAME = re.compile(r'\[rank(\d+)\]:\s+File "([^"]+)", line (\d+)')


def in_torchs_words(hangs: Sequence[Script], *, jobs: int = 1) -> list[Line]:
    """Run every script under torchrun; one line each."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(_one, hangs))


def _one(script: Script) -> Line:
    detail, _ = _under_torchrun(script, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    _, traced = _under_torchrun(script, TORCH_FR_BUFFER_SIZE="2000")
    said = next((name for name, it in _SAYINGS if it.search(detail.output)), "")
    return {
        "id": script.name,
        "kind": script.kind,
        "seconds": round(detail.seconds, 1),
        "said": said or "nothing",
        "ranks_named": _ranks_named(script, said, detail.output),
        "lines_named": _lines_named(script, detail.output),
        "fr_trace": traced,
    }


def _under_torchrun(script: Script, **variables: str) -> tuple[Ended, str]:
    """How it ended, and what `fr_trace` made of its dumps."""
    with tempfile.TemporaryDirectory(prefix="distlab-autopsy-") as name:
        folder = Path(name)
        dumps = folder / "dumps"
        dumps.mkdir()
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(script.world_size), str(Path(__file__))),
            *(str(dumps), str(script.path)),
        ]
        ended = run(command, folder, _LIMIT_S, variables=variables)
        traced = _fr_trace(folder, dumps) if any(dumps.iterdir()) else "no dumps"
        return ended, traced


def _ranks_named(script: Script, said: str, output: str) -> bool:
    """Whether the sentence that torch printed has the guilty ranks."""
    if said not in ("mismatch", "monitored", "same model"):
        return False
    pattern = dict(_SAYINGS)[said]
    sentences = [line for line in output.splitlines() if pattern.search(line)]
    found = {
        int(rank)
        for sentence in sentences
        for ranks in _RANKS.findall(sentence)
        for rank in ranks.split(", ")
    }
    return script.guilty <= found


def _lines_named(script: Script, output: str) -> bool:
    """Whether the tracebacks have a marked line of every guilty rank."""
    frames = {
        (int(rank), int(line))
        for rank, path, line in _FRAME.findall(output)
        if path == str(script.path)
    }
    return all(
        any((rank, mark.line) in frames for mark in script.marks_of(rank))
        for rank in script.guilty
    )


def _fr_trace(folder: Path, dumps: Path) -> str:
    """What `fr_trace` makes of the dumps: `errors`, `nothing`, or `fails`."""
    module = "torch.distributed.flight_recorder.fr_trace"
    command = [sys.executable, "-m", module, str(dumps), "-p", "rank_"]
    ended = run(command, folder, _LIMIT_S)
    if ended.exit_code != 0:
        return "fails"
    return "errors" if _TRACED.search(ended.output) else "nothing"


def table(lines: Sequence[Line]) -> str:
    """The lines as text, and the totals under them."""
    rows = [
        f"{line['id']:<42} {line['said']:<10} {line['seconds']:>5.1f} s  "
        f"ranks {line['ranks_named']!s:<5}  lines {line['lines_named']!s:<5}  "
        f"fr_trace {line['fr_trace']}"
        for line in lines
    ]
    both = sum(line["ranks_named"] and line["lines_named"] for line in lines)
    said = Counter(line["said"] for line in lines)
    traced = Counter(line["fr_trace"] for line in lines)
    return "\n".join(
        [
            *rows,
            "",
            f"ranks and lines named  {both} of {len(lines)}",
            f"said                   {dict(said.most_common())}",
            f"fr_trace               {dict(traced.most_common())}",
        ]
    )


# ── a rank ──────────────────────────────────────────────────────────────────────────


def _rank(dumps: Path, path: str) -> None:
    import os

    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = timedelta(seconds=TIMEOUT_S)
    file = dumps / f"rank_{os.environ['RANK']}"
    if "TORCH_FR_BUFFER_SIZE" in os.environ:
        threading.Thread(target=_dump_now_and_then, args=(file,), daemon=True).start()
    sys.argv = [path]
    sys.path[0] = str(Path(path).parent)
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        if "TORCH_FR_BUFFER_SIZE" in os.environ:
            _dump(file)


def _dump_now_and_then(file: Path) -> None:
    while True:
        time.sleep(_DUMP_EVERY_S)
        _dump(file)


def _dump(file: Path) -> None:
    from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

    fresh = file.parent.parent / f"fresh_{file.name}_{threading.get_ident()}"
    fresh.write_bytes(_dump_fr_trace())
    fresh.replace(file)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), sys.argv[2])
