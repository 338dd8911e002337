"""Run one launch: an agent, which isn't a rank, and the ranks of this node.

    agent of node 0       keeps the store, asks the Launcher what to do     hub
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
from distlab.launch.follower import Follower, HostFollower
from distlab.launch.hangs import Hangs
from distlab.launch.host import Host
from distlab.launch.hosts import Hosts
from distlab.launch.hub import Hub, Say
from distlab.launch.inbox import Inbox
from distlab.launch.logs import Folder, RankLog, Terminal, open_logs
from distlab.launch.monitored import Monitored
from distlab.launch.numbering import numbered
from distlab.launch.ranks import Ranks, command_for, with_own_name
from distlab.launch.recovery_decisions import RecoveryDecisions
from distlab.launch.report import PREFIX
from distlab.launch.stage import OtherNodes
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
            DecisionError: the code of unit process_group has a mistake.
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
            monitored, hangs = None, None
            if config.monitor is not None:
                own_name = self.config.run_id
                monitored = Monitored(config, program[0], own_name)
                stack.callback(monitored.close)
                for line in monitored.lines:
                    _say(f"{PREFIX} figures: {line}\n")
            if config.explain_hangs:
                hangs = Hangs(config)
                stack.callback(hangs.close)
            shown = logs, terminal
            ranks: Ranks | Host
            if config.stays:
                ranks = Host(config, program, *shown)
            else:
                command = command_for(program, config.run_as)
                ranks = Ranks(config, command, *shown, inbox.queue, monitored, hangs)
            stack.callback(ranks.kill)
            if store is None:
                follower = HostFollower if config.stays else Follower
                return follower(
                    config,
                    ranks=ranks,
                    logs=logs,
                    terminal=terminal,
                    inbox=inbox,
                    say=_say,
                ).run()
            agent: Agent | Hub
            if isinstance(ranks, Host):
                agent = _agent(config, ranks, store, stage, terminal, inbox)
            else:
                agent = Hub(
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
            return _with_farewell(agent, stage, ranks, inbox)


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


def _agent(
    config: LaunchConfig,
    host: Host,
    store: Store,
    stage: OtherNodes | None,
    terminal: Terminal,
    inbox: Inbox,
) -> Agent:
    """Make the agent of ranks that keep running when one of them dies."""
    folder = Path(config.log_dir or ".")
    forget_resize(folder)
    recovery = RecoveryDecisions(config)
    decisions = ElasticDecisions(config) if config.elastic else recovery
    own = [*decisions.own, *recovery.own]
    if own := list(dict.fromkeys(own)):
        _say(f"{PREFIX} with your {' and '.join(own)}\n")
    return Agent(
        on=decisions.on,
        detect=recovery.detect,
        resize=getattr(decisions, "resize", lambda room: []),
        hosts=Hosts(config, host, store, stage, _say),
        folder=folder,
        forwarded=config.forwarded,
        terminal=terminal,
        inbox=inbox,
        say=_say,
    )


def _open(
    config: LaunchConfig,
    decisions: Decisions,
    inbox: Inbox,
    stack: contextlib.ExitStack,
    listener: socket.socket | None,
) -> tuple[Store, OtherNodes | None]:
    """Open node 0's ports, for the store and for the agents to meet."""
    stage = None
    tasks = [LAUNCH, RENDEZVOUS] if config.nnodes > 1 else [LAUNCH]
    if own := [task for task in tasks if decisions.whose(task) == "yours"]:
        _say(f"{PREFIX} with your {' and '.join(own)}\n")
    if config.nnodes > 1:
        rendezvous = decisions.rendezvous(config.nnodes)
        stage = OtherNodes(config, rendezvous, inbox, listener)
        stack.callback(stage.close)
    store = open_store(config)
    stack.callback(store.close)
    return store, stage


def _logs(
    config: LaunchConfig, folder: Folder, stack: contextlib.ExitStack
) -> dict[int, RankLog]:
    first = config.node * config.num_on_node
    logs = open_logs(
        folder,
        range(first, min(first + config.num_on_node, config.world_size)),
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


def _with_farewell(
    agent: Hub | Agent, stage: OtherNodes | None, ranks: Ranks | Host, inbox: Inbox
) -> int:
    try:
        return agent.run()
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
