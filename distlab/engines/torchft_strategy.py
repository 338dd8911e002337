"""Train with torchft: replicas that may die and come back while the others go on.

    fit() ─▶ lighthouse, who is alive?         replica 0 ─▶ manager ─┐
         └─▶ a process for each replica        replica 1 ─▶ manager ─┴─▶ quorum ─▶ step

Before each step, every replica asks the lighthouse for a quorum: the replicas whose
heartbeats arrive. They average their gradients over gloo. If a replica is killed, the
all-reduce fails on the others, nobody takes the step, and they repeat it in a quorum
without that replica. We restart the replica. It joins the quorum of a later step, and
one of the others sends it the state: weights, optimizer, and the position in the epoch.

So outside the steps, a replica trains as if it were alone. Each one validates with all
samples, and its losses are those of its own part. The samples of an absent replica are
left out, as torchft does it too.

We call the manager ourselves. OptimizerWrapper asks for a quorum in zero_grad(), which
our loop calls at the end of a step. In torchft 0.2.0, the hook of its DDP fails with an
AssertionError inside backward() when gloo reports a lost replica. Therefore we average
after backward(), all gradients at once.

Source: torchft's documentation, "Manager", "Process Groups" and "Lighthouse".
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from distlab.engines import rank as ranks
from distlab.engines.config import DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.losses import Loss
from distlab.engines.optimizers import Make, make_optimizer
from distlab.engines.outside import end, engine, environment_of_ranks
from distlab.engines.samples import Microbatch
from distlab.engines.strategies import register_strategy
from distlab.engines.strategy import Moved, Strategy
from distlab.processes.tree import die_with_parent

LOCALHOST = "127.0.0.1"
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # torchft's own name
MEETING = "DISTLAB_TORCHFT_MEETING"  # the port where the first replicas meet
LIFE = "DISTLAB_TORCHFT_LIFE"  # how often this replica has been restarted
HEARTBEAT = timedelta(milliseconds=100)
DEAD_AFTER_MS = 2000  # without a heartbeat
JOIN_MS = 60_000  # how long a quorum waits for a replica that is alive
OPERATION = timedelta(minutes=1)
QUORUM = timedelta(minutes=10)  # the others may be validating
LIVES = 3  # restarts of a replica
LOOK_S = 0.05


class TorchFT(Strategy):
    """One replica of the training, which may lose the others and be lost.

    Raises:
        EngineError: torchft isn't installed, or no lighthouse is named.
    """

    def __init__(
        self,
        config: DistributedConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Make | None,
    ) -> None:
        super().__init__(config)
        torchft = load()
        if LIGHTHOUSE not in os.environ:
            raise EngineError(
                f"{LIGHTHOUSE} isn't set: call fit() in a script that you start by "
                "hand or with distlab train --backend torchft"
            )
        self.rank, self.world_size = (
            int(os.environ[n]) for n in ("RANK", "WORLD_SIZE")
        )
        self.device = torch.device("cpu")
        self.module = self.forward = model
        self.optimizer = make_optimizer(model, optimizer)
        self.life = int(os.environ.get(LIFE, "0"))
        # Each replica is a group of one rank, whose store its manager needs.
        self.store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=OPERATION),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=OPERATION,
            quorum_timeout=QUORUM,
            connect_timeout=OPERATION,
            rank=0,
            world_size=1,
            store_addr=LOCALHOST,
            store_port=self.store.port,
            replica_id=f"replica_{self.rank}",
            hostname=LOCALHOST,
            heartbeat_interval=HEARTBEAT,
        )
        self.is_in_step = self.has_joined = self.was_moved = False
        self.num_present = self.world_size
        self.done: list[tuple[Loss, Any, Microbatch]] = []  # microbatches of this step
        if self.life == 0 and MEETING in os.environ:
            self._meet(int(os.environ[MEETING]))

    @property
    def group_rank(self) -> int:
        """Implement `Strategy.group_rank`."""
        return 0

    @property
    def group_size(self) -> int:
        """Implement `Strategy.group_size`."""
        return 1

    @property
    def saves(self) -> bool:
        """Implement `Strategy.saves`: the first replica that is there."""
        first = self.manager.participating_rank()
        return self.rank == 0 if first is None else first == 0

    def share_state(
        self, state: Callable[[], Any], take: Callable[[Any], None]
    ) -> None:
        """Implement `Strategy.share_state`."""

        def taken(given: Any) -> None:
            take(given)
            self.was_moved = True

        self.manager.register_state_dict_fn("distlab", taken, state)

    def _meet(self, port: int) -> None:
        """Wait until all replicas of a new training send heartbeats."""
        store = TCPStore(LOCALHOST, port, is_master=False, timeout=QUORUM)
        store.set(f"replica_{self.rank}", "here")
        store.wait([f"replica_{other}" for other in range(self.world_size)], QUORUM)

    # ── a step ──────────────────────────────────────────────────────────────────────

    def learn(self, loss: Loss, batch: Any, micro: Microbatch) -> Tensor:
        """Implement `Strategy.learn`; the first microbatch of a step asks for a quorum.

        Raises:
            Moved: this replica was behind, and has the others' state now.
        """
        if not self.is_in_step:
            self._begin_step()
        self.done.append((loss, batch, micro))
        return super().learn(loss, batch, micro)

    def _begin_step(self) -> None:
        """Find out who is there, and take the others' state if they are further.

        Raises:
            Moved: this replica was behind.
            EngineError: it was restarted, and no replica is left that has the state.
        """
        self.done, self._counts, self._num_mixed = [], [], 0
        self.module.zero_grad()
        self.manager.start_quorum()
        self.is_in_step = True
        moved, self.was_moved = self.was_moved, False
        if self.life and not self.has_joined and not moved:
            raise EngineError(
                f"replica {self.rank} was restarted, but no other replica is left to "
                "take the state from"
            )
        self.has_joined = True
        self._report()
        if moved:
            raise Moved

    def _report(self) -> None:
        """Say how many replicas there are, if that has changed."""
        before, self.num_present = self.num_present, self.manager.num_participants()
        if self.num_present != before and self.saves:
            _say(f"{self.num_present} of {self.world_size} replicas train now")

    def step(self) -> float:
        """Implement `Strategy.step`; repeat it with the others if a replica is lost.

        Raises:
            Moved: meanwhile the others took the step without this replica.
        """
        norm = self._try_step()
        while norm is None:
            done = self.done
            self._begin_step()
            for loss, batch, micro in done:
                self.learn(loss, batch, micro)
            norm = self._try_step()
        self.is_in_step = False
        return norm

    def _try_step(self) -> float | None:
        """Take the step, unless a replica was lost while we averaged."""
        self.present = self.num_present / self.world_size
        try:
            self._average()
            self.divide()
            norm = self.clip(self.config.gradient_clipping)
        except LostError:
            norm = 0.0  # the manager knows of the error, so it doesn't commit
        if not self.manager.should_commit():
            return None
        self.optimizer.step()
        self.module.zero_grad()
        return norm

    def _average(self) -> None:
        """Average the gradients over the replicas that are there."""
        trained = self.trained()
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in trained:
            assert parameter.grad is not None
            by_type.setdefault(parameter.dtype, []).append(parameter.grad)
        for grads in by_type.values():
            flat = torch.cat([grad.flatten() for grad in grads])
            self.manager.allreduce(flat).wait()
            self._expect_all_there()
            parts = flat.split([grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))

    def sum_of_step(self, tensor: Tensor) -> Tensor:
        """Implement `Strategy.sum_of_step`."""
        self.manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
        self._expect_all_there()
        return tensor

    def _expect_all_there(self) -> None:
        if self.manager.errored():
            raise LostError

    def sum(self, tensor: Tensor) -> Tensor:
        """Implement `Strategy.sum` over this replica alone."""
        return tensor

    def close(self) -> None:
        """Implement `Strategy.close`."""
        self.manager.shutdown(wait=False)


class LostError(Exception):
    """A replica died while the others averaged with it."""


# ── starting the replicas ───────────────────────────────────────────────────────────


def load() -> Any:
    """Import torchft, without a line in the log for each of its messages.

    Raises:
        EngineError: torchft isn't installed.
    """
    os.environ.setdefault("RUST_LOG", "error")
    return engine("torchft", "torchft")


def start_replicas(folder: Path, config: DistributedConfig) -> int:
    """Run rank.py with a folder as every replica; return the exit code."""
    with running(config) as replicas:
        program = [ranks.__file__, str(folder)]
        return replicas.run(program, log_dir=folder)


def run_script_on_torchft(
    script: Path,
    arguments: Sequence[str],
    config: DistributedConfig,
    *,
    log_dir: Path | None,
    address: str | None = None,
) -> int:
    """Run a user's script as every replica; return the exit code.

    Raises:
        EngineError: torchft isn't installed.
    """
    with running(config) as replicas:
        return replicas.run([str(script), *arguments], log_dir=log_dir)


class Replicas:
    """The processes of all replicas, of which we restart those that are killed."""

    def __init__(self, world_size: int, environment: dict[str, str]) -> None:
        self.world_size, self.environment = world_size, environment
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.lives = dict.fromkeys(range(world_size), 0)
        self.is_done = False
        self.logs: dict[int, IO[bytes]] = {}

    def run(self, program: Sequence[str], log_dir: Path | None) -> int:
        """Run a program until its replicas have ended; return 0 if one finished."""
        for replica in range(self.world_size):
            self._start(replica, program, log_dir)
        while self.processes:
            time.sleep(LOOK_S)
            for replica, process in [*self.processes.items()]:
                code = process.poll()
                if code is None:
                    continue
                del self.processes[replica]
                failed = self._ended(replica, code, program, log_dir)
                if failed:
                    return failed
        return 0 if self.is_done else 1

    def _ended(
        self, replica: int, code: int, program: Sequence[str], log_dir: Path | None
    ) -> int:
        """Restart a replica that was killed; return 0 unless one has failed."""
        self.is_done |= code == 0
        if self.is_done:
            return 0  # whoever came back too late has nobody to join
        if code > 0:
            return code
        name = signal.Signals(-code).name
        self.lives[replica] += 1
        if self.lives[replica] > LIVES:
            _say(f"replica {replica} was ended by {name} again, so we leave it out")
            return 0
        _say(f"replica {replica} was ended by {name}; the others go on, it restarts")
        self._start(replica, program, log_dir)
        return 0

    def _start(
        self, replica: int, program: Sequence[str], log_dir: Path | None
    ) -> None:
        place = {"RANK": replica, LIFE: self.lives[replica]}
        said: Any = None
        if log_dir is not None:
            if replica not in self.logs:
                log_dir.mkdir(parents=True, exist_ok=True)
                self.logs[replica] = (log_dir / f"rank_{replica}.log").open("wb")
            said = self.logs[replica]
        self.processes[replica] = subprocess.Popen(
            [sys.executable, *program],
            env={**self.environment, **{name: str(v) for name, v in place.items()}},
            stdout=None if replica == 0 else said,
            stderr=said,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )

    def end(self) -> None:
        """End what still runs."""
        for process in self.processes.values():
            process.terminate()  # all of them at once
        for process in self.processes.values():
            end(process)
        for log in self.logs.values():
            log.close()


@contextlib.contextmanager
def running(config: DistributedConfig) -> Iterator[Replicas]:
    """Run a lighthouse in this block, and end the replicas after it.

    Raises:
        EngineError: torchft isn't installed.
    """
    load()
    coordination = engine("torchft.coordination", "torchft")
    server = coordination.LighthouseServer(
        bind=f"{LOCALHOST}:0",
        min_replicas=1,
        join_timeout_ms=JOIN_MS,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=DEAD_AFTER_MS,
    )
    store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    port = server.address().rpartition(":")[2]
    environment = {
        **environment_of_ranks(),
        "WORLD_SIZE": str(config.world_size),
        LIGHTHOUSE: f"http://{LOCALHOST}:{port}",
        MEETING: str(store.port),
    }
    replicas = Replicas(config.world_size, environment)
    try:
        yield replicas
    finally:
        replicas.end()
        server.shutdown()


def _say(line: str) -> None:
    print(f"distlab: {line}", file=sys.stderr, flush=True)


register_strategy(
    "torchft",
    TorchFT,
    needs="torchft",
    start_ranks=start_replicas,
    run_script=run_script_on_torchft,
    has_replicas=True,
    precisions=("bf16",),
    communication_backends=("gloo",),
    keeps_optimizer=True,
    refusals={
        "monitor_dir": (
            "backend torchft has no records of all ranks, because its replicas come "
            "and go: leave monitor_dir out"
        ),
        "num_nodes": "backend torchft starts all replicas on one node",
    },
)
