"""One launch: an agent, which is no rank, with the ranks of this node.

    agent of node 0       keeps the store, asks task 3.18 what to do        hub
    agents of others      do what node 0 says                               follower

Example: `launch_distributed_training("train.py", "--epochs", "3", nproc_per_node=4)`
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from distlab.launch.agent import Agent
from distlab.launch.config import LaunchConfig, LaunchError, config_from
from distlab.launch.decisions import LAUNCH, RENDEZVOUS, DecisionError, Decisions
from distlab.launch.elastic_decisions import ElasticDecisions, forget_resize
from distlab.launch.follower import Follower
from distlab.launch.forked import Forked
from distlab.launch.hub import Hub, Say
from distlab.launch.inbox import Inbox
from distlab.launch.logs import Log, Terminal, open_logs
from distlab.launch.ranks import Meeting, Ranks, command_for, rank_variables
from distlab.launch.recovery_decisions import RecoveryDecisions
from distlab.launch.report import PREFIX
from distlab.launch.stage import Stage
from distlab.launch.stores import Store
from distlab.launch.streams import tell
from distlab.runner.processes import become_subreaper, stop_being_subreaper


class DistributedLauncher:
    """Starts the ranks of scripts as `config` says; one launch at a time.

    Example: `DistributedLauncher(LaunchConfig(nproc_per_node=2)).launch("train.py")`
    returns the exit code, 0 if all ranks ended with 0.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self.config = config

    def launch(self, script: str | Path, *arguments: object) -> int:
        """Run `script` on all ranks until they have ended; the exit code.

        Blocks. Lines of the ranks go to stdout with `[rank r]` before them, what the
        agent says to stderr. Called in the main thread, it answers SIGINT and SIGTERM.

        Raises:
            LaunchError: it cannot begin: no such script, a port in use, …
            DecisionError: the code of task 3.17 or 3.18 has a mistake.
        """
        path = Path(script)
        if not path.is_file():
            is_there = path.exists()
            what = "is no file" if is_there else "is not there"
            raise LaunchError(f"the script {path} {what}")
        expect_gpus(self.config)
        command = command_for(str(path), [str(argument) for argument in arguments])
        decisions = Decisions()
        inbox = Inbox()
        with inbox.signals(), contextlib.closing(inbox), _orphans_come_here():
            return self._run(command, decisions, inbox)

    def _run(self, command: Sequence[str], decisions: Decisions, inbox: Inbox) -> int:
        config = self.config
        num_here = config.world_size if config.stays else config.nproc_per_node
        first = config.node * config.nproc_per_node
        with contextlib.ExitStack() as stack:
            store, stage = None, None
            if config.node == 0:
                store, stage = self._open(decisions, inbox, stack)
            logs = self._logs(range(first, first + num_here), stack)
            terminal = Terminal(logs, _show)
            stack.callback(terminal.close)
            ranks = Ranks(config, command, logs, inbox.queue)
            stack.callback(ranks.kill)
            if store is not None and config.stays:
                return self._run_agent(command, store, logs, terminal, inbox, stack)
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
            )
            return _with_farewell(hub, stage, ranks, inbox)

    def _run_agent(
        self,
        command: Sequence[str],
        store: Store,
        logs: dict[int, Log],
        terminal: Terminal,
        inbox: Inbox,
        stack: contextlib.ExitStack,
    ) -> int:
        """Ranks and standbys, which stay when one of them dies."""
        config = self.config
        meeting = Meeting(address=config.master_addr, port=store.port, generation=1)
        forget_resize(Path(config.log_dir))
        environment = rank_variables(config, 0, meeting, os.environ)
        for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"):
            environment.pop(name)
        processes = Forked(command[1], command[2:], environment)
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
            folder=Path(config.log_dir),
            terminal=terminal,
            inbox=inbox,
            store=store,
            say=_say,
        ).run()

    def _open(
        self, decisions: Decisions, inbox: Inbox, stack: contextlib.ExitStack
    ) -> tuple[Store, Stage | None]:
        """Node 0's ports: that of the store, and where agents meet."""
        config, stage = self.config, None
        tasks = [LAUNCH, RENDEZVOUS] if config.nnodes > 1 else [LAUNCH]
        if own := [task for task in tasks if decisions.whose(task) == "yours"]:
            _say(f"{PREFIX} with your {' and '.join(own)}\n")
        if config.nnodes > 1:
            rendezvous = decisions.rendezvous(config.nnodes)
            stage = Stage(config, rendezvous, inbox)
            stack.callback(stage.close)
        port = 0 if stage else config.master_port
        store = Store(config.master_addr, port, config.listens_on)
        stack.callback(store.close)
        return store, stage

    def _logs(
        self, ranks: Sequence[int], stack: contextlib.ExitStack
    ) -> dict[int, Log]:
        try:
            logs = open_logs(Path(self.config.log_dir), ranks)
        except OSError as error:
            reason = error.strerror or str(error)
            raise LaunchError(
                f"the logs cannot be written in {self.config.log_dir}: {reason}; name "
                "another folder with --log-dir"
            ) from error

        def close() -> None:
            for log in logs.values():
                log.close()

        stack.callback(close)
        return logs


def launch_distributed_training(
    script: str | Path, *args: object, **config: object
) -> int:
    """Run a script on several ranks; the exit code.

    `config` has the names of LaunchConfig.

    Raises:
        LaunchError, DecisionError: see `DistributedLauncher.launch`.

    Example: `launch_distributed_training("train.py", "--epochs", 3, nproc_per_node=2)`
    """
    return DistributedLauncher(config_from(config)).launch(script, *args)


def expect_gpus(config: LaunchConfig) -> None:
    """See that `nccl` has what it needs.

    Raises:
        LaunchError: this node has fewer GPUs than ranks.
    """
    if config.backend != "nccl":
        return
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus < config.nproc_per_node:
        raise LaunchError(
            f"backend nccl needs a GPU for each of {config.nproc_per_node} ranks, and "
            f"torch finds {num_gpus}: choose gloo or tcp"
        )


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
    """What a rank leaves behind is ours to end."""
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
