"""The table of strategies: what a training may run on, and what each one can do.

A file called *_strategy.py in this folder registers its strategies:

    register_strategy("name", Factory, …)      in name_strategy.py, once it's imported

That entry is all that the rest of the package knows about a strategy: the checks of a
configuration, the trainers, `distlab train` and its help text read it here. So if you
add a strategy, you write one file. We import the files when somebody first asks for a
strategy. They must not import the library that they run on before a rank opens them.

Another package registers a strategy in the same way, in a module that its metadata
names as an entry point:

    [project.entry-points."distlab.strategies"]
    name = "package.module"
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from distlab.engines.expect import EngineError
from distlab.engines.outside import not_installed
from distlab.registry import Registry

# config.py imports this file, and job.py and strategy.py import config.py.
DistributedConfig: TypeAlias = Any
Job: TypeAlias = Any
Outcome: TypeAlias = Any
Strategy: TypeAlias = Any

DEFAULT = "pytorch-ddp"
GROUP = "distlab.strategies"
LIMITS = {
    "mixed_precision": "precisions",
    "zero_stage": "zero_stages",
    "communication_backend": "communication_backends",
    "compression": "compressions",
}
"""Fields of DistributedConfig, and where an entry lists the values that it accepts."""
ONLY_SOME = (
    "find_unused_parameters",
    "offload_params",
    "offload_optimizer",
    "deepspeed_config",
)
"""Fields of DistributedConfig that an entry has to list in `takes`."""

Starter = Callable[[Path, DistributedConfig], int]
"""Runs rank.py with a folder on all ranks, and returns the exit code."""


class RunScript(Protocol):
    """Runs a user's script as every rank, and returns the exit code."""

    def __call__(
        self,
        script: Path,
        arguments: Sequence[str],
        config: DistributedConfig,
        *,
        log_dir: Path | None,
        address: str | None,
    ) -> int:
        """Run the script."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A strategy, as it registers itself.

    `factory(config, model, optimizer)` opens it in the process of a rank. Every other
    field has the value of a strategy that runs in the ranks of our own launcher, needs
    nothing installed, and only averages gradients.
    """

    name: str
    factory: Callable[..., Strategy]
    needs: str = ""
    """The module that you install separately, such as "horovod.torch"."""
    install: str = ""
    """How you install it; "" means the pip extra with the strategy's name."""

    # ── who starts the ranks ────────────────────────────────────────────────────────

    start_ranks: Starter | None = None
    """Starts a trainer's ranks; None means distlab.launch."""
    train: Callable[[Job, str | None], Outcome] | None = None
    """Trains a job at an address, if rank.py and a folder aren't how its ranks work."""
    run_script: RunScript | None = None
    """Starts the ranks of a user's script; None means distlab.launch."""
    script_runner: str = ""
    """A module whose main(communication_backend, script, arguments) runs a script as
    one rank, and which you can also launch; "" if the script needs no preparation."""
    has_replicas: bool = False
    """True if its ranks may come and go, so that each returns an outcome."""
    rank_variable: str = ""
    """The environment variable in which its launcher tells a process its rank."""
    world_size_variable: str = ""

    # ── what it accepts ─────────────────────────────────────────────────────────────

    trains: str = "torch"
    """The kind of model: torch or keras."""
    precisions: tuple[str, ...] = ("bf16", "fp16")
    zero_stages: tuple[int, ...] = (0,)
    default_stage: int = 0
    communication_backends: tuple[str, ...] = ("gloo", "nccl")
    compressions: tuple[str, ...] = ("none",)
    takes: tuple[str, ...] = ()
    """Which fields of ONLY_SOME it honors, and "address" if it runs on a cluster."""
    implied_by: tuple[str, ...] = ()
    """Fields that choose this strategy if you don't name one."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Sentences that refuse a field: any value that isn't the default or, for a field
    of LIMITS, one that isn't listed."""
    check: Callable[[DistributedConfig], None] | None = None
    """Raises EngineError if fields don't go together."""
    trains_loss: bool = False
    """True if it also trains the parameters of a loss that is a module."""
    keeps_optimizer: bool = False
    """True if its optimizer has torch's own state_dict, which the caller gets back."""

    def expect_installed(self) -> None:
        """Find the module that this strategy needs, without importing it.

        Raises:
            EngineError: it isn't installed; the message says how to get it.
        """
        if not self.needs:
            return
        try:
            found = importlib.util.find_spec(self.needs)
        except (ImportError, ValueError):  # its package is missing
            found = None
        if found is None:
            top = self.needs.partition(".")[0]
            raise not_installed(top, self.name, self.install)

    def expect_fits(self, config: DistributedConfig) -> None:
        """Refuse fields that this strategy can't honor.

        Raises:
            EngineError: the message names the first one.
        """
        usual = {one.name: one.default for one in fields(config)}
        for name, accepted in LIMITS.items():
            value = getattr(config, name)
            if name == "mixed_precision":  # whose True means fp16
                value = config.precision
            known = getattr(self, accepted)
            if value is not None and value not in known:
                raise self._refused(name, value, known)
        for name in ONLY_SOME:
            if getattr(config, name) != usual[name] and name not in self.takes:
                able = [one.name for one in strategies() if name in one.takes]
                raise EngineError(
                    f"{name} is given, but backend is {self.name}: choose "
                    + " or ".join(able)
                )
        for name, sentence in self.refusals.items():
            if name not in LIMITS and getattr(config, name) != usual[name]:
                raise EngineError(sentence)
        if self.check is not None:
            self.check(config)

    def _refused(self, name: str, value: Any, known: Sequence[Any]) -> EngineError:
        if name in self.refusals:
            return EngineError(self.refusals[name])
        listed = ", ".join(map(str, known)) or "none"
        others = _names(lambda one: value in getattr(one, LIMITS[name]))
        hint = f": choose {others[0]}" if others else ""
        return EngineError(
            f"{name} is {value!r}; backend {self.name} has {listed}{hint}"
        )


_table = Registry[Entry](
    "strategy", __name__.rpartition(".")[0], GROUP, "backend", EngineError
)


def register_strategy(
    name: str, factory: Callable[..., Strategy], **facts: Any
) -> Entry:
    """Add a strategy to the table; `facts` are the fields of Entry.

    Raises:
        ValueError: another strategy has this name.
    """
    entry = Entry(name=name, factory=factory, **facts)
    _table.add(name, entry, factory)
    return entry


def strategies() -> tuple[Entry, ...]:
    """Return all strategies: those that need nothing installed first, then by name."""
    order = sorted(
        _table.entries(),
        key=lambda one: (one.needs != "", one.name != DEFAULT, one.name),
    )
    return tuple(order)


def strategy_names(trains: str | None = None) -> tuple[str, ...]:
    """Return the names of all strategies, or of those for one kind of model."""
    return _names(lambda one: trains in (None, one.trains))


def find_strategy(name: str) -> Entry:
    """Return the entry of the strategy with this name.

    Raises:
        EngineError: there is no such strategy, or its package can't be imported.
    """
    return _table.find(name, strategy_names)


def implied_strategy(config: DistributedConfig) -> str:
    """Return the strategy that the other fields of a configuration ask for."""
    for one in strategies():
        if any(getattr(config, name) is not None for name in one.implied_by):
            return one.name
    stage = config.zero_stage
    able = _names(lambda one: not one.needs and stage in one.zero_stages)
    return able[0] if able else DEFAULT


def is_rank() -> bool:
    """Return True if a launcher has started this process as one rank of several."""
    # In a batch script without srun, SLURM_PROCID is 0 and there is no step's node.
    is_srun = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    named = ("RANK", *(one.rank_variable for one in strategies()))
    return is_srun or any(name in os.environ for name in named)


def rank_of_launcher() -> int:
    """Return the rank that a launcher has set for this process, or 0 without one."""
    own = (one.rank_variable for one in strategies())
    return int(_first_set(("RANK", "SLURM_PROCID", *own)) or 0)


def ranks_of_job(otherwise: int) -> int:
    """Return the number of ranks in the job whose launcher started this process."""
    own = (one.world_size_variable for one in strategies())
    return int(_first_set(("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", *own)) or otherwise)


def _first_set(names: Sequence[str]) -> str:
    return next((os.environ[name] for name in names if name in os.environ), "")


def _names(is_meant: Callable[[Entry], bool]) -> tuple[str, ...]:
    return tuple(one.name for one in strategies() if is_meant(one))
