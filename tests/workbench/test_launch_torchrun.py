"""`distlab.launch` understands what torchrun understands: option by option."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from distlab.launch import LaunchConfig, LaunchError, options
from distlab.launch.arguments import parse
from distlab.launch.config import config_from
from distlab.launch.logs import (
    LEFT_BYTES,
    PROGRESS_S,
    Folder,
    RankLog,
    Terminal,
    open_logs,
)
from distlab.launch.output import Output
from distlab.launch.ranks import Meeting, job_name, rank_variables, with_own_name
from tests.workbench.course import ROOT
from tests.workbench.golden import Golden
from tests.workbench.launching import free_port, linux, script, torchrun

# ── every option ────────────────────────────────────────────────────────────────────


def torchs() -> list[argparse.Action]:
    actions = get_args_parser()._actions
    return [a for a in actions if a.option_strings and a.dest != "help"]


MEANS: dict[str, tuple[str, dict[str, Any]]] = {
    "nnodes": ("1:3", {"nnodes": 3, "min_nodes": 1}),
    "nproc_per_node": ("3", {"nproc_per_node": 3}),
    "rdzv_backend": ("c10d", {"any_port": True}),
    "rdzv_endpoint": ("h:29401", {"master_addr": "h", "master_port": 29401}),
    "rdzv_id": ("job7", {"run_id": "job7"}),
    "rdzv_conf": ("join_timeout=60", {"start_timeout": 60}),
    "standalone": ("", {"nnodes": 1}),
    "max_restarts": ("3", {"max_restarts": 3}),
    "monitor_interval": ("0.5", {"monitor_interval": 0.5}),
    "start_method": ("forkserver", {}),
    "event_log_handler": ("console", {}),
    "role": ("trainer", {"role": "trainer", "output": Output(role="trainer")}),
    "module": ("", {"run_as": "module"}),
    "no_python": ("", {"run_as": "command"}),
    "run_path": ("", {"run_as": "path"}),
    "log_dir": ("logs", {"log_dir": "logs"}),
    "redirects": ("3", {"output": Output(redirects=3)}),
    "tee": ("0:1,1:3", {"output": Output(tee={0: 1, 1: 3})}),
    "local_ranks_filter": ("0,2", {"output": Output(local_ranks=frozenset({0, 2}))}),
    "duplicate_stdout_filters": (
        "a,,b,c",
        {"output": Output(stdout_filters=("a,b", "c"))},
    ),
    "duplicate_stderr_filters": ("x", {"output": Output(stderr_filters=("x",))}),
    "node_rank": ("1", {"node_rank": 1}),
    "master_addr": ("h", {"master_addr": "h"}),
    "master_port": ("29501", {"master_port": 29501}),
    "local_addr": (
        "127.0.0.2",
        {"local_addr": "127.0.0.2", "master_addr": "127.0.0.2"},
    ),
    "numa_binding": ("node", {"numa_binding": "node"}),
    "signals_to_handle": ("SIGUSR1", {"signals_to_handle": ("SIGUSR1",)}),
    "shutdown_timeout": ("5", {"grace_period": 5.0}),
    "virtual_local_rank": ("", {"virtual_local_rank": True}),
}
REFUSED = {"logs_specs": "--log-dir"}


@pytest.mark.parametrize("action", torchs(), ids=lambda action: str(action.dest))
def test_each_option_of_torch_has_its_meaning_or_names_its_replacement(
    action: argparse.Action,
) -> None:
    name = action.dest
    option = options.TORCHRUNS[name]
    assert option.is_flag == (action.nargs == 0)
    kind = type(action).__name__
    assert option.is_torchruns == (kind in ("env", "check_env") or name in REFUSED)
    text, settings = MEANS.get(name, ("x", {}))
    for flag in action.option_strings:
        value = [] if option.is_flag else [text]
        if name in REFUSED:
            with pytest.raises(LaunchError, match=f"{flag}.*{REFUSED[name]}"):
                parse([flag, *value, "s.py"])
            continue
        line = parse([flag, *value, "s.py", flag, "x"])
        assert (line.settings, line.arguments) == (settings, (flag, "x"))
        if value and flag.startswith("--"):
            assert parse([f"{flag}={text}", "s.py"]).settings == settings
    if name not in REFUSED and option.is_torchruns:
        variables = {f"PET_{name.upper()}": text or "1"}
        assert parse(["s.py"], variables).settings == settings
    for choice in action.choices or ():
        parse([action.option_strings[0], choice, "s.py"])


def test_the_table_has_no_option_that_torch_does_not_have() -> None:
    # One that torch drops stays accepted, so this is about misspelled ones only.
    names = {action.dest for action in torchs()}
    assert names >= options.TORCHRUNS.keys() - {"numa_binding", "virtual_local_rank"}
    assert {*MEANS, *REFUSED} == options.TORCHRUNS.keys()


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ("-m pkg.mod", {"run_as": "module"}),
        ("-r3 s.py", {"output": Output(redirects=3)}),
        ("-t 0:3 s.py", {"output": Output(tee={0: 3})}),
        ("--use-env s.py", {}),
        ("--nproc_per_node=cpu s.py", {"nproc_per_node": options.num_cpus()}),
        ("--rdzv_endpoint=[::1]:7 s.py", {"master_addr": "::1", "master_port": 7}),
        ("--rdzv_endpoint=fe80::1 s.py", {"master_addr": "fe80::1", "master_port": 0}),
        (
            "--rdzv_backend c10d --rdzv_endpoint localhost:0 s.py",
            {"master_addr": "127.0.0.1", "master_port": 0, "any_port": True},
        ),
        (
            "--nnodes 2 --rdzv_backend c10d --rdzv_endpoint h s.py",
            {"nnodes": 2, "master_addr": "h", "master_port": 29400, "any_node": True},
        ),
        (
            "--nnodes 2 --node_rank 1 --rdzv_endpoint h:1 s.py",
            {"nnodes": 2, "node_rank": 1, "master_addr": "h", "master_port": 1},
        ),
        (
            "--nnodes 2 --rdzv_backend c10d --rdzv_endpoint h:1 "
            "--rdzv_conf is_host=true,keep_alive_interval=2 s.py",
            {
                "nnodes": 2,
                "master_addr": "h",
                "master_port": 1,
                "node_rank": 0,
                "node_timeout": 6.0,
            },
        ),
        ("--standalone --rdzv_endpoint h:1 --master_port 5 s.py", {"nnodes": 1}),
    ],
)
def test_options_together(said: str, settings: dict[str, Any]) -> None:
    assert parse(said.split()).settings == settings


def test_srun_says_what_the_line_does_not() -> None:
    srun = {"nnodes": 2, "node_rank": 1, "master_addr": "a", "master_port": 3}
    assert parse(["s.py"], {}, srun).settings == srun
    assert parse(["--standalone", "s.py"], {}, srun).settings == {"nnodes": 1}
    assert parse(["--nnodes", "1", "s.py"], {}, srun).settings == {"nnodes": 1}
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=b:1"]
    settings = parse([*place, "s.py"], {}, srun).settings
    place_of_line = {"master_addr": "b", "master_port": 1, "any_node": True}
    assert settings == {"nnodes": 2, **place_of_line}


def test_the_line_is_stronger_than_the_environment() -> None:
    variables = {"PET_NPROC_PER_NODE": "4", "PET_STANDALONE": "0", "PET_ROLE": ""}
    assert parse(["s.py"], variables).settings == {"nproc_per_node": 4}
    line = parse(["--nproc-per-node=2", "s.py"], variables)
    assert line.settings == {"nproc_per_node": 2}
    with pytest.raises(LaunchError, match=r"PET_NNODES.*'a'"):
        parse(["s.py"], {"PET_NNODES": "a"})
    with pytest.raises(LaunchError, match=r"PET_MODULE.*'yes'"):
        parse(["s.py"], {"PET_MODULE": "yes"})


WRONG = (
    "--nproc-per-node many s.py",
    "--nproc-per-node xpu s.py",
    "--rdzv-backend etcd s.py",
    "--rdzv-endpoint h:99999 s.py",
    "--rdzv-conf rank s.py",
    "--rdzv-conf join_timeout=soon s.py",
    "--rdzv-conf store_type=file s.py",
    "--rdzv-conf tls=1 s.py",
    "--redirects 4 s.py",
    "--local-ranks-filter a s.py",
    "--start-method thread s.py",
    "--event-log-handler mine s.py",
    "--logs-specs mine s.py",
    "--numa-binding all s.py",
    "--signals-to-handle SIGNONE s.py",
    "--signals-to-handle SIGKILL s.py",
    "--standalone --nnodes 2 s.py",
    "--standalone=1 s.py",
    "--module --no-python s.py",
    "-x s.py",
    "--standby 1 --no-python s.py",
    "--standby 1 -r 1 s.py",
    "--standby 1 --virtual-local-rank s.py",
)


def test_what_cannot_be_is_one_sentence(golden: Golden) -> None:
    said = []
    for line in WRONG:
        with pytest.raises(LaunchError) as caught:
            config_from(parse(line.split()).settings)
        assert "\n" not in str(caught.value)
        said.append(str(caught.value))
    golden("launch/torchrun", "\n".join(said))


# ── what ranks find ─────────────────────────────────────────────────────────────────

VARIABLES = """
import json, os, sys
names = [n for n in os.environ if n.split("_")[0] in (
    "RANK", "LOCAL", "GROUP", "ROLE", "WORLD", "MASTER", "TORCHELASTIC", "OMP")]
found = {n: os.environ[n] for n in names}
os.write(1, b"GOT" + json.dumps(found).encode() + b"\\n")  # a line, whole
"""


@pytest.mark.slow
def test_ranks_find_every_variable_that_torchrun_sets(tmp_path: Path) -> None:
    path = script(tmp_path, VARIABLES)
    command = [*torchrun(tmp_path, 2), "--role=trainer", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    found = [json.loads(piece) for piece in re.findall(r"GOT(.*)", done.stdout)]
    theirs = next(variables for variables in found if variables["RANK"] == "1")
    config = LaunchConfig(nproc_per_node=2, role="trainer")
    meeting = Meeting(address="127.0.0.1", port=1, generation=1)
    ours = rank_variables(config, 1, meeting, {})
    ours["TORCHELASTIC_ERROR_FILE"] = "rank_1.error.json"  # set where the log is known
    assert not theirs.keys() - ours.keys()
    differ = {name for name in theirs if theirs[name] != ours[name]}
    assert differ <= {
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
        "TORCHELASTIC_ERROR_FILE",
    }


def test_jobs_on_one_node_have_names_of_their_own() -> None:
    # As with torchrun --standalone. Several agents can't agree on one: torchrun's none.
    def name(environment: dict[str, str], **fields: Any) -> str:
        config = with_own_name(LaunchConfig(**fields), environment)
        return job_name(config, environment)

    assert len({name({}) for _ in range(3)}) == 3
    assert name({"SLURM_JOB_ID": "7"}) == "7"
    assert name({"SLURM_JOB_ID": "7"}, run_id="a") == "a"
    assert name({}, nnodes=2, node_rank=0) == "none"


def test_a_virtual_local_rank_sees_one_gpu() -> None:
    config = LaunchConfig(nproc_per_node=2, virtual_local_rank=True, run_id="a")
    meeting = Meeting(address="127.0.0.1", port=1, generation=1)
    found = rank_variables(config, 1, meeting, {"CUDA_VISIBLE_DEVICES": "4, 6"})
    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"]) == ("0", "6")
    assert found["TORCHELASTIC_RUN_ID"] == "a"
    assert rank_variables(config, 1, meeting, {})["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(LaunchError, match=r"\b1\b.*=4$"):
        rank_variables(config, 1, meeting, {"CUDA_VISIBLE_DEVICES": "4"})


# ── launches ────────────────────────────────────────────────────────────────────────

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the command line in an empty folder; nothing may appear there."""
    here = tmp_path / "here"
    here.mkdir()

    def start(*line: str, **variables: str) -> Done:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        done = subprocess.run(
            [sys.executable, "-m", "distlab.launch", *line],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert list(here.iterdir()) == []
        assert "distlab/launch/" not in done.stderr  # no traceback of ours
        return done

    return start


SPEAKS = """
print("out", rank, sys.argv[1:], flush=True)
print("err", rank, file=sys.stderr, flush=True)
"""


def test_streams_are_shown_as_the_options_say_and_all_are_in_the_logs(
    run: Run, tmp_path: Path
) -> None:
    path, logs = str(script(tmp_path, SPEAKS)), tmp_path / "logs"
    common = ("--nproc-per-node=3", "--log-dir", str(logs), "--role", "r")
    line = ("-r", "0:3,1:1", "--tee=1:1", "--local-ranks-filter=0,1")
    filters = ("--duplicate-stdout-filters=out 2,none",)
    template = {
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name}${local_rank}]: "
    }
    done = run(*common, *line, *filters, path, "${local_rank}", **template)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[r1]: err 1", "[r1]: out 1 ['1']"]
    assert (logs / "rank_0.log").read_text() == "out 0 ['0']\n"
    assert (logs / "rank_0.stderr.log").read_text() == "err 0\n"
    assert (logs / "filtered_stdout.log").read_text() == "[r2]: out 2 ['2']\n"


@pytest.mark.slow
def test_redirected_streams_are_in_a_folder_that_is_named(
    run: Run, tmp_path: Path
) -> None:
    path = str(script(tmp_path, SPEAKS))
    done = run("--nproc-per-node=1", "-r3", path, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")
    (log,) = tmp_path.glob("distlab-launch-*/rank_0.log")
    assert str(log.parent) in done.stderr
    assert log.read_text() == "out 0 []\nerr 0\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "program"),
    [
        (["-m"], "here.program"),
        (["--no-python"], "sh"),
        (["--run-path"], "{folder}/program.py"),
        (["--standby=0", "-m"], "here.program"),
    ],
)
def test_a_program_may_be_a_module_a_command_or_a_path(
    run: Run, tmp_path: Path, flags: list[str], program: str
) -> None:
    package = tmp_path / "pkg" / "here"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    says = "import sys; print(__name__, sys.argv[1:]); sys.exit(3)"
    (package / "program.py").write_text(says)
    path = {"PYTHONPATH": f"{tmp_path / 'pkg'}{os.pathsep}{ROOT}"}
    command = program.format(folder=package)
    arguments = ["-c", "echo $0 $RANK; exit 3", "a"] if command == "sh" else ["a"]
    done = run("--standalone", *flags, command, *arguments, **path)
    assert done.returncode == 3
    said = "a 0" if command == "sh" else "__main__ ['a']"
    # A process that joins no group has no rank, so only the report shows its lines.
    shown = done.stderr if "--standby=0" in flags else done.stdout
    assert f" {said}\n" in shown


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--nproc-per-node=2"], ["--standby=1"]])
def test_a_usage_error_is_not_restarted(
    run: Run, tmp_path: Path, flags: list[str]
) -> None:
    program = """
    import argparse
    print("up", flush=True)
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.parse_args()
    """
    path = str(tmp_path / "program.py")
    Path(path).write_text("\n".join(line.strip() for line in program.splitlines()))
    logs = str(tmp_path / "logs")
    done = run(*flags, "--max-restarts=5", "--log-dir", logs, path, "--lr", "fast")
    assert done.returncode == 2
    assert done.stdout.count("up\n") <= 2
    assert "'fast'" in done.stdout + done.stderr


RECORDS = """
import os, signal, sys, time
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("no data in shard 7")
    time.sleep(600)

main()
"""


@pytest.mark.slow
def test_what_record_notes_reaches_the_report_and_the_agents_own_file(
    run: Run, tmp_path: Path
) -> None:
    path, error_file = tmp_path / "program.py", tmp_path / "error.json"
    path.write_text(RECORDS)
    own = {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    done = run("--nproc-per-node=2", "--grace-period=5", str(path), **own)
    assert done.returncode == 1
    assert "ValueError: no data in shard 7" in done.stderr
    record = json.loads(error_file.read_text())["message"]
    assert record["message"] == "ValueError: no data in shard 7"
    assert record["errorCode"] == 1
    assert "no data" in record["extraInfo"]["py_callstack"]


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "heard"),
    [
        ("SIGUSR1", signal.SIGUSR1),
        ("SIGINT,SIGTERM", signal.SIGINT),
        ("SIGUSR2", signal.SIGTERM),  # the usual ones may save: see --help
    ],
)
def test_a_signal_that_was_named_reaches_the_ranks_as_it_is(
    run: Run, tmp_path: Path, named: str, heard: int
) -> None:
    sent = heard if heard != signal.SIGTERM else signal.SIGINT
    program = f"""
    def heard(number, frame):
        print("heard", number, flush=True)
        sys.exit(0)
    for number in ({sent:d}, {heard:d}):
        signal.signal(number, heard)
    os.kill(os.getppid(), {sent:d})
    time.sleep(600)
    """
    path = str(script(tmp_path, program))
    done = run(f"--signals-to-handle={named}", path)
    assert done.returncode == 128 + sent
    assert done.stdout == f"[rank 0] heard {heard:d}\n"


@pytest.mark.slow
def test_nodes_that_only_know_where_to_meet_are_numbered(tmp_path: Path) -> None:
    program = "print(os.environ['GROUP_RANK'], rank, os.environ['WORLD_SIZE'])"
    path = str(script(tmp_path, program))
    line = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job"]
    line += [f"--rdzv-endpoint=localhost:{free_port()}", path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "distlab.launch", *line],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0]
    assert sorted(said) == ["[rank 0] 0 0 2\n", "[rank 1] 1 1 2\n"]


# ── a lot of output ─────────────────────────────────────────────────────────────────


def test_of_a_lot_of_output_of_a_failed_job_the_last_part_is_shown(
    tmp_path: Path,
) -> None:
    log, shown = RankLog(0, tmp_path), list[str]()
    terminal = Terminal({0: log}, shown.append)
    with terminal._changed:  # it waits: all comes at once
        for number in range(60):
            os.write(log.descriptor, b"%d\n" % number + b"x" * 65_000 + b"\n")
        terminal.hurry()
    terminal.close()
    lines = "".join(shown).splitlines()
    assert terminal.left_out == [log.path]
    assert str(log.path) in lines[0]
    assert lines[-2].startswith("[rank 0] 59")
    assert LEFT_BYTES - 65_010 < sum(map(len, lines[1:])) < LEFT_BYTES + 65_010
    log.close()


@linux
def test_logs_that_nobody_keeps_do_not_fill_the_disk(tmp_path: Path) -> None:
    log, shown = RankLog(0, tmp_path), list[str]()
    terminal = Terminal({0: log}, shown.append, gives_back=True)
    for _ in range(70):
        os.write(log.descriptor, (b"x" * 1023 + b"\n") * 1024)
    os.write(log.descriptor, b"last\n")
    terminal.close()
    assert "".join(shown).count("\n") == 70 * 1024 + 1
    assert log.last_lines(1) == ["last"]
    with contextlib.suppress(AssertionError):  # a file system without holes
        assert log.path.stat().st_blocks * 512 < 70 << 20
    log.close()


def test_a_progress_bar_is_shown_before_its_line_ends(tmp_path: Path) -> None:
    log = RankLog(0, tmp_path)
    (stream,) = log.streams

    def after(written: bytes, now_s: float) -> list[bytes]:
        os.write(log.descriptor, written)
        lines = stream.read(stream.size)
        return lines + stream.progress(now_s)

    assert after(b"\r 1 %", 0.0) == []  # it may end at once
    assert after(b"\r 2 %\r 3 %", PROGRESS_S) == [b" 3 %"]
    assert after(b"\r 4 %\r", PROGRESS_S + 1) == []
    assert after(b"", 2 * PROGRESS_S) == [b" 4 %"]
    assert after(b"", 3 * PROGRESS_S) == []  # it has not moved
    (line,) = after(b"done\n", 4 * PROGRESS_S)
    assert line.endswith(b"\rdone")
    assert after(b"a line", 5 * PROGRESS_S) == []
    assert after(b"\r 1 %", 6 * PROGRESS_S) == []
    log.close()


def test_a_folder_that_nobody_asked_for_goes_with_the_launch(tmp_path: Path) -> None:
    folder = Folder(None, is_kept=False)
    log = RankLog(0, folder.path, is_kept=folder.is_kept)
    assert log.where == ""
    log.close()
    folder.close()
    assert not folder.path.exists()
    kept = Folder(tmp_path)
    kept.close()
    assert tmp_path.is_dir()


def test_logs_that_cannot_be_written_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=rf"{tmp_path}/file\b.*--log-dir"):
        open_logs(Folder(tmp_path / "file"), [0], lambda _: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(LaunchError, match="--log-dir"):
        Folder(None)
