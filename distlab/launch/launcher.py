"""Run one launch: an agent, which isn't a rank, and the ranks of this node.

    agent of node 0       keeps the store, asks task 3.18 what to do        hub
    agents of others      do what node 0 says                               follower

Example: `launch_distributed_training("train.py", "--epochs", "3", nproc_per_node=4)`
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from distlab.launch.agent import Agent
from distlab.launch.config import LaunchConfig, LaunchError, config_from
from distlab.launch.decisions import LAUNCH, RENDEZVOUS, DecisionError, Decisions
from distlab.launch.elastic_decisions import ElasticDecisions, forget_resize
from distlab.launch.expectations import expect_program, expect_resources
from distlab.launch.follower import Follower
from distlab.launch.forked import Forked
from distlab.launch.hangs import Hangs
from distlab.launch.hub import Hub, Say
from distlab.launch.inbox import Inbox
from distlab.launch.logs import Folder, Log, Terminal, open_logs
from distlab.launch.monitored import Monitored
from distlab.launch.numbering import numbered
from distlab.launch.ranks import (
    Meeting,
    Ranks,
    command_for,
    rank_variables,
    with_own_name,
)
from distlab.launch.recovery_decisions import RecoveryDecisions
from distlab.launch.report import PREFIX
from distlab.launch.stage import Stage
from distlab.launch.stores import Store, open_store
from distlab.launch.streams import tell
from distlab.processes.tree import become_subreaper, stop_being_subreaper


class DistributedLauncher:
    """Starts the ranks of scripts according to `config`, one launch at a time.

    For example,
    `DistributedLauncher(LaunchConfig(nproc_per_node=2)).launch("train.py")` returns the
    exit code, which is 0 if all ranks ended with 0.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self.config = config

    def launch(self, script: str | Path, *arguments: object) -> int:
        """Run `script` on all ranks until they have ended; return the exit code.

        This blocks. The ranks' lines go to stdout, each after `[rank r]`, and the
        agent's lines go to stderr. If you call it in the main thread, it handles SIGINT
        and SIGTERM.

        Raises:
            LaunchError: the launch can't start, for example because the script doesn't
                exist or a port is in use.
            DecisionError: the code of task 3.17 or 3.18 has a mistake.
        """
        expect_program(str(script), self.config.run_as)
        expect_resources(self.config)
        program = [str(script), *map(str, arguments)]
        decisions = Decisions()
        inbox = Inbox(self.config.handled)
        with inbox.signals(), contextlib.closing(inbox), _orphans_come_here():
            return self._run(program, decisions, inbox)

    def _run(self, program: Sequence[str], decisions: Decisions, inbox: Inbox) -> int:
        with contextlib.ExitStack() as stack:
            config, listener = numbered(self.config, lambda: inbox.num_interrupts > 0)
            store, stage = None, None
            if config.node == 0:
                store, stage = _open(config, decisions, inbox, stack, listener)
            folder = Folder(config.log_dir, is_kept=config.output.keeps_logs)
            stack.callback(folder.close)
            if config.log_dir is None and folder.is_kept:
                _say(f"{PREFIX} the ranks' logs are in {folder.path}\n")
            named = with_own_name(config, os.environ)
            config = replace(named, log_dir=folder.path)
            logs = _logs(config, folder, stack)
            terminal = Terminal(
                logs,
                _show,
                config.output,
                local_rank=config.local_rank,
                gives_back=not folder.is_kept,
            )
            stack.callback(_close, terminal, folder)
            if store is not None and config.stays:
                return _run_agent(config, program, store, logs, terminal, inbox, stack)
            command = command_for(program, config.run_as)
            monitored = None
            if config.monitor is not None:
                own_name = self.config.run_id
                monitored = Monitored(config, program[0], own_name)
                stack.callback(monitored.close)
                for line in monitored.lines:
                    _say(f"{PREFIX} figures: {line}\n")
            hangs = Hangs(config) if config.explain_hangs else None
            if hangs is not None:
                stack.callback(hangs.close)
            ranks = Ranks(config, command, logs, inbox.queue, monitored, hangs)
            stack.callback(ranks.kill)
            if store is None:
                return Follower(
                    config,
                    ranks=ranks,
                    logs=logs,
                    terminal=terminal,
                    inbox=inbox,
                    say=_say,
                ).run()
            hub = Hub(
                config,
                decisions,
                ranks=ranks,
                logs=logs,
                terminal=terminal,
                inbox=inbox,
                store=store,
                stage=stage,
                say=_say,
                hangs=hangs,
            )
            return _with_farewell(hub, stage, ranks, inbox)


def launch_distributed_training(
    script: str | Path, *args: object, **config: object
) -> int:
    """Run a script on several ranks; return the exit code.

    `config` takes the fields of LaunchConfig.

    Raises:
        LaunchError, DecisionError: as in `DistributedLauncher.launch`.

    Example: `launch_distributed_training("train.py", "--epochs", 3, nproc_per_node=2)`
    """
    return DistributedLauncher(config_from(config)).launch(script, *args)


def _run_agent(
    config: LaunchConfig,
    program: Sequence[str],
    store: Store,
    logs: dict[int, Log],
    terminal: Terminal,
    inbox: Inbox,
    stack: contextlib.ExitStack,
) -> int:
    """Run ranks and standbys, which keep running when one of them dies."""
    folder = Path(config.log_dir or ".")
    meeting = Meeting(address=config.master_addr, port=store.port, generation=1)
    forget_resize(folder)
    environment = rank_variables(config, 0, meeting, os.environ)
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"):
        environment.pop(name)
    processes = Forked(program, environment, run_as=config.run_as)
    stack.callback(processes.close)
    recovery = RecoveryDecisions(config)
    decisions = ElasticDecisions(config) if config.elastic else recovery
    own = [*decisions.own, *recovery.own]
    if own := list(dict.fromkeys(own)):
        _say(f"{PREFIX} with your {' and '.join(own)}\n")
    return Agent(
        on=decisions.on,
        detect=recovery.detect,
        resize=getattr(decisions, "resize", list),
        processes=processes,
        logs=logs,
        folder=folder,
        forwarded=config.forwarded,
        terminal=terminal,
        inbox=inbox,
        store=store,
        say=_say,
    ).run()


def _open(
    config: LaunchConfig,
    decisions: Decisions,
    inbox: Inbox,
    stack: contextlib.ExitStack,
    listener: socket.socket | None,
) -> tuple[Store, Stage | None]:
    """Open node 0's ports, for the store and for the agents to meet."""
    stage = None
    tasks = [LAUNCH, RENDEZVOUS] if config.nnodes > 1 else [LAUNCH]
    if own := [task for task in tasks if decisions.whose(task) == "yours"]:
        _say(f"{PREFIX} with your {' and '.join(own)}\n")
    if config.nnodes > 1:
        rendezvous = decisions.rendezvous(config.nnodes)
        stage = Stage(config, rendezvous, inbox, listener)
        stack.callback(stage.close)
    store = open_store(config)
    stack.callback(store.close)
    return store, stage


def _logs(
    config: LaunchConfig, folder: Folder, stack: contextlib.ExitStack
) -> dict[int, Log]:
    num_here = config.world_size if config.stays else config.nproc_per_node
    first = config.node * config.nproc_per_node
    logs = open_logs(
        folder,
        range(first, first + num_here),
        lambda rank: config.output.is_split(config.local_rank(rank)),
    )

    def close() -> None:
        for log in logs.values():
            log.close()

    stack.callback(close)
    return logs


def _close(terminal: Terminal, folder: Folder) -> None:
    terminal.close()
    if terminal.left_out:  # we told the user to look there for the rest
        folder.is_kept = True


def _with_farewell(hub: Hub, stage: Stage | None, ranks: Ranks, inbox: Inbox) -> int:
    try:
        return hub.run()
    except (LaunchError, DecisionError, RuntimeError) as error:
        # A service's mistake is told to whoever calls it, and in full to the inbox.
        found = [one for one in inbox.take() if isinstance(one, DecisionError)]
        cause = found[0] if found else error
        ranks.kill()
        if stage is not None:
            stage.finish(1, f"{PREFIX} node 0 gave up: {cause}\n")
        raise cause from error


@contextlib.contextmanager
def _orphans_come_here() -> Iterator[None]:
    """Adopt the processes that a rank leaves behind, so that we can end them."""
    is_ours = become_subreaper()
    try:
        yield
    finally:
        if is_ours:
            stop_being_subreaper()


def _show(line: str) -> None:
    tell(sys.stdout, line)


def _say(text: str) -> None:
    tell(sys.stderr, text)


__all__ = ["DistributedLauncher", "Say", "launch_distributed_training"]
