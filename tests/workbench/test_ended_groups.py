"""What a process group leaves behind: no thread that still wants the interpreter.

One that asks for its lock while the program ends takes the process along: SIGABRT.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

import distlab.distributed as dist
from distlab.comm import CommRefusedError
from distlab.distributed.wrapped import wrap
from tests.workbench.launching import linux


def gloo_threads() -> int:
    names = (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
    return sum(name.startswith("pt_gloo") for name in names)


@linux
@pytest.mark.parametrize("fails", [False, True])
def test_gloos_threads_end_with_the_group_whoever_still_holds_it(fails: bool) -> None:
    before = gloo_threads()
    dist.init_process_group("gloo", world_size=1, rank=0)
    comm = dist.default_comm()
    comm.all_reduce(torch.ones(1))
    assert gloo_threads() > before
    try:
        assert not fails
    except AssertionError:
        dist.destroy_process_group()
    dist.destroy_process_group()
    assert gloo_threads() == before
    with pytest.raises(CommRefusedError, match="allreduce"):
        comm.all_reduce(torch.ones(1))
    assert comm.rank == 0


def test_a_default_group_made_for_an_engine_ends_with_ours() -> None:
    assert not torch_dist.is_initialized()
    for opens_first in (False, True):
        dist.init_process_group("gloo", world_size=1, rank=0)
        if opens_first:
            store = torch_dist.HashStore()  # type: ignore[attr-defined]
            torch_dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        wrapped = wrap("ddp", torch.nn.Linear(1, 1), dist.default_comm())
        wrapped(torch.ones(1, 1)).sum().backward()
        assert torch_dist.is_initialized()
        dist.destroy_process_group()
        assert torch_dist.is_initialized() == opens_first, "the caller's own stays"
    torch_dist.destroy_process_group()
