"""Run a script, as it is, on simulated ranks: `torchrun`, in one process.

    from distlab.sim.torch.script import Script, run_script

    done = run_script(Script("train.py", ("--lr", "0.1")), 256, per_node=8)
    done.outcome, done.time_s, done.explanation, done.ranks[3].output

Each rank executes the script under the name `__main__`, with its own modules,
arguments, environment, folder, output and random numbers (see belongings). What the
script calls of torch.distributed is carried out by the simulator (see the package).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

import torch

from distlab.sim.results import SimRun
from distlab.sim.torch import run
from distlab.sim.torch.belongings import STATEFUL, UsersModules, own_process
from distlab.sim.torch.libraries import adapted
from distlab.sim.torch.pretend import pretended
from distlab.sim.torch.process import as_if_alone
from distlab.sim.torch.rank import Rank, here
from distlab.sim.torch.replacing import Refused


@dataclass(frozen=True)
class Script:
    """A file, or with `is_module` a module as for `python -m`, and its arguments."""

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        """How a report calls it."""
        return self.target if self.is_module else Path(self.target).name


def run_script(
    script: Script,
    world_size: int,
    *,
    own: Collection[str] = (),
    device: Literal["cuda", "cpu"] = "cuda",
    around: Callable[[int], AbstractContextManager[Any]] | None = None,
    on_rank: Callable[[Rank], None] | None = None,
    **options: Any,
) -> SimRun:
    """Run `script` on each of `world_size` simulated ranks.

    `own` names installed packages that every rank loads for itself, because they keep
    state that ranks must not share. With the device "cuda" each rank finds a pretend
    GPU (see pretend), with "cpu" none. `around(rank)` is entered on each rank, in its
    thread, before the script starts, and left when it has ended; what `__enter__` gives
    is the rank's value. `on_rank` is called with each `Rank` before that: afterwards it
    knows its memory and its notes on what was left out. Other `options` (per_node, net,
    flops_per_s, faults, on_output, …) are those of `distlab.sim.torch.run` and
    `distlab.sim.run`.

    A rank that ends with `sys.exit(0)` has finished; any other exit is an error.

    Raises:
        ValueError: there is no such script or module, its syntax is wrong, or what
            `distlab.sim.torch.run` refuses.
    """
    code = None if script.is_module else _compiled(script.target)
    folder = os.getcwd()
    first = folder if script.is_module else str(Path(script.target).resolve().parent)
    if script.is_module:
        _require_module(script.target)
    argv, path = [script.target, *script.args], [first, *sys.path]
    users = UsersModules({*STATEFUL, *own})
    pretends = device == "cuda"
    with ExitStack() as stack:
        stack.callback(os.chdir, folder)
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.enter_context(as_if_alone())
        stack.enter_context(adapted())
        if pretends:
            stack.enter_context(pretended())
        return run(
            partial(_play, script, code, around or (lambda rank: nullcontext())),
            world_size,
            is_initialized=False,
            prepare=partial(_prepare, users.names, pretends, on_rank),
            belongings=partial(own_process, argv, path, users),
            **options,
        )


def _prepare(
    users: Collection[str],
    pretends: bool,
    on_rank: Callable[[Rank], None] | None,
    rank: Rank,
) -> None:
    rank.users, rank.pretends = users, pretends
    if on_rank is not None:
        on_rank(rank)


def _compiled(target: str) -> CodeType:
    """The code of a file.

    Raises:
        ValueError: it cannot be read, or is not Python.
    """
    try:
        return compile(Path(target).read_bytes(), target, "exec", dont_inherit=True)
    except OSError as error:
        raise ValueError(f"{target}: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{target} is not a Python script: {error}") from error


def _require_module(name: str) -> None:
    """Find a module without importing it, or the packages that it is in.

    Raises:
        ValueError: there is none.
    """
    top, here = name.partition(".")[0], os.getcwd()
    sys.path.insert(0, here)
    try:
        found = importlib.util.find_spec(top)
    finally:
        sys.path.remove(here)
    if found is None:
        raise ValueError(f"there is no module named {top}")


def _play(
    script: Script,
    code: CodeType | None,
    around: Callable[[int], AbstractContextManager[Any]],
) -> Any:
    """One rank's part: the script from its first line to its last."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if code is None:
        code = _module_code(script.target, main)
    else:
        main.__file__ = script.target
    with around(int(os.environ["RANK"])) as value:
        try:
            exec(code, main.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        except Refused:
            raise  # the sentence says all
        except Exception as error:
            _print_as_python_would(error)
            raise
        finally:
            rank = here()
            while rank is not None and rank.at_exit:
                rank.at_exit.pop()()
    return value


def _module_code(name: str, main: ModuleType) -> CodeType:
    """The code of a module, as `python -m` finds it.

    Raises:
        ImportError: it cannot be run.
    """
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code(name) if get_code else None
    if spec is None or code is None:
        raise ImportError(f"there is no module {name} that can be run")
    main.__spec__, main.__package__ = spec, spec.parent
    main.__file__, main.__loader__ = spec.origin, spec.loader
    sys.argv[0] = spec.origin or name
    return code  # type: ignore[no-any-return]


def _print_as_python_would(error: Exception) -> None:
    """The traceback, from the script's own frame on."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename == __file__:
        step = step.tb_next
    lines = traceback.format_exception(type(error), error, step or error.__traceback__)
    sys.stderr.write("".join(lines))
