"""`distlab.distributed`: models that differ between ranks, or change after wrapping."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.utils import prune

import distlab.distributed as dist
from distlab.comm import Journal, leave_default_group
from distlab.distributed.agreement import differing
from distlab.runner import Cluster, RankContext
from tests.workbench.distributed_ranks import begin, ranks
from tests.workbench.golden import Golden

Wrap = Callable[[nn.Module], nn.Module]


def told(act: Callable[[], Any]) -> str:
    """The error that `act` ends with."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ── before training: the ranks compare what they bring ──────────────────────────────


def reordered(names: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})


def with_buffer(size: int) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(size))
    return model


def tied(is_tied: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if is_tied:
        model[1].weight = model[0].weight
    return model


def frozen(is_frozen: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(not is_frozen)
    return model


DIFFERENT: dict[str, tuple[Callable[[int], nn.Module], str]] = {  # by rank; named
    "wider": (lambda r: nn.Linear(2, 2 + r), r"weight: \(2, 2\).* 1 .*\(3, 2\)"),
    "same size": (lambda r: nn.Linear(3 - r, 2 + r, bias=False), r"\(2, 3\).*\(3, 2\)"),
    "longer": (
        lambda r: nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + r)]),
        r"^\w+: rank 0 .*\b1\.weight\b.* rank 1 .*\b1\.weight\b",
    ),
    "dtype": (
        lambda r: nn.Linear(2, 2, dtype=torch.float64 if r else torch.float32),
        r"weight.*float32.*weight.*float64",
    ),
    "order": (lambda r: reordered("ba" if r else "ab"), r"a\.weight.*b\.weight"),
    "buffer": (lambda r: with_buffer(r + 1), r"buffer seen: \(1,\).*\(2,\)"),
    "no buffer": (lambda r: with_buffer(1) if r else nn.Linear(2, 2), r"buffer seen"),
    "frozen": (lambda r: frozen(bool(r)), r"0\.weight.*requires_grad.*0\.weight"),
    "tied": (lambda r: tied(bool(r)), r"1\.weight.*1\.weight\b.*\b0\.weight"),
    "lazy": (
        lambda r: nn.LazyLinear(2) if r else nn.Linear(2, 2),
        r"^ValueError: weight\b|weight.*an error, weight",
    ),
    "lazy on both": (lambda _: nn.LazyLinear(2), r"^ValueError: weight\b"),
    "meta": (lambda _: nn.Linear(2, 2, device="meta"), r"^ValueError: weight.*\bmeta"),
    "wrapped": (
        lambda _: dist.DistributedDataParallel(nn.Linear(2, 2)),
        r"^ValueError.*\.module$",
    ),
}


def different_models(context: RankContext, backend: str) -> dict[str, str]:
    rank, _ = begin(context, backend)
    found = {
        name: told(partial(dist.DistributedDataParallel, make(rank)))
        for name, (make, _) in DIFFERENT.items()
    }
    model = nn.Linear(2, 2)
    for name, value in (
        ("find_unused_parameters", bool(rank)),
        ("bucket_size_mb", 1 + rank),
        ("comm_hook", told if rank else None),
    ):
        named: Any = {name: value}
        found[name] = told(partial(dist.DistributedDataParallel, model, **named))
    halves = [nn.Linear(4 + 4 * rank, 4), nn.Linear(4, 4)]
    plan: Any = {"0": "column" if rank else "row"}
    found["tensor"] = told(
        lambda: dist.TensorParallel(nn.Sequential(nn.Linear(4, 4)), plan=plan)
    )
    found["pipeline"] = told(
        lambda: dist.PipelineParallel(
            halves, torch.zeros(4), nn.functional.mse_loss, num_microbatches=2
        )
    )
    found["none"] = told(partial(dist.DistributedDataParallel, model))
    assert dist.all_reduce(torch.ones(1)).item() == 2  # nothing is left over
    return found


@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_models_that_differ_are_refused_on_every_rank(
    cluster: Cluster, backend: str, golden: Golden
) -> None:
    named = {name: pattern for name, (_, pattern) in DIFFERENT.items()} | {
        "find_unused_parameters": r"find_unused_parameters=False.*=True",
        "bucket_size_mb": r"bucket_size_mib=1\b.*=2\b",
        "comm_hook": r"comm_hook=None.*comm_hook=told",
        "tensor": r"\b0\b.*row.*column",
        "pipeline": r"0\.weight: \(4, 4\).*\(4, 8\)",
    }
    both = ranks(cluster, different_models, 2, backend)
    for found in both:
        assert found.pop("none") == ""
        assert set(found) == set(named)
        for name, pattern in named.items():
            assert re.search(pattern, found[name]), (name, found[name])
    lines = [f"{name} | {text}" for name, text in both[0].items()]
    golden("distributed/models-that-differ", "\n".join(lines))


# ── after wrapping: what would train on one rank's own gradient is refused ──────────


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()


def unfreeze(net: nn.Sequential) -> None:
    net[0].requires_grad_(True)


def add(net: nn.Sequential) -> None:
    net.append(nn.Linear(1, 1).double())


def replace(net: nn.Sequential) -> None:
    net[1] = nn.Linear(2, 3).double()


def remove(net: nn.Sequential) -> None:
    del net[1]


def assign(net: nn.Sequential) -> None:
    state = {name: torch.ones_like(value) for name, value in net.state_dict().items()}
    net.load_state_dict(state, assign=True)


def convert(net: nn.Sequential) -> None:
    net.float()


def freeze(net: nn.Sequential) -> None:
    net[0].bias.requires_grad_(False)


def resize_buffer(net: nn.Sequential) -> None:
    net.seen = torch.zeros(2)


def step_in_backward(net: nn.Sequential, keep: bool) -> None:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = torch.zeros_like(parameter) if keep else None

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


CHANGES: dict[str, tuple[Callable[[nn.Sequential], None], str]] = {
    "unfreeze": (unfreeze, r"\b0\.weight\b"),
    "add": (add, r"\b2\.weight\b"),
    "replace": (replace, r"\b1\.weight\b"),
    "remove": (remove, r"\b1\.weight\b"),
    "assign": (assign, r"\b0\.weight\b"),
    "convert": (convert, r"\b0\.weight\b.*float64.*float32"),
    "freeze": (freeze, r"\b0\.bias\b.*find_unused_parameters=True"),
    "buffer": (resize_buffer, r"\bseen\b.*\(1,\).*\(2,\).*broadcast_buffers=False"),
    "step": (partial(step_in_backward, keep=False), r"\b1\.bias\b.*step\(\)"),
    "step, keep": (partial(step_in_backward, keep=True), r"\b1\.bias\b.*step\(\)"),
}


def changes(context: RankContext) -> dict[str, str]:
    rank, _ = begin(context)
    found = {}
    for name, (change, _) in CHANGES.items():
        net = two_layers()
        net.register_buffer("seen", torch.zeros(1))
        net[0].requires_grad_(name != "unfreeze")
        model = dist.DistributedDataParallel(net)
        inputs = torch.full((3, 2), 1.0 + rank, dtype=torch.float64)
        model(inputs).sum().backward()
        net.zero_grad()
        change(net)
        inputs = inputs.to(net[0].weight.dtype)
        found[name] = told(lambda m=model, x=inputs: m(x).sum().backward())  # type: ignore[misc]
    net = two_layers()
    model = dist.DistributedDataParallel(net)
    found["create_graph"] = told(
        lambda: (
            model(torch.ones(1, 2).double()).square().sum().backward(None, True, True)
        )
    )
    dist.DistributedDataParallel(net)
    found["a newer one"] = told(lambda: model(torch.ones(1, 2).double()))
    return found


def test_a_changed_model_is_refused_by_its_parameters_name(
    cluster: Cluster, golden: Golden
) -> None:
    found, other = ranks(cluster, changes, 2)
    assert found == other
    for name, (_, pattern) in CHANGES.items():
        assert re.search(f"^RuntimeError: .*{pattern}", found[name]), found[name]
    assert re.search(r"^RuntimeError: .*create_graph", found["create_graph"])
    assert found["a newer one"].startswith("RuntimeError: ")
    lines = [f"{name} | {text}" for name, text in found.items()]
    golden("distributed/models-that-change", "\n".join(lines))


# ── what may change: as torch's class, where torch's can do it ──────────────────────


def unfrozen_later(wrap: Wrap, rank: int, n: int) -> nn.Module:
    """Frozen for two steps, then wrapped anew and trained as a whole."""
    net = two_layers()
    net[0].requires_grad_(False)
    model = wrap(net)
    for step in range(4):
        if step == 2:
            net[0].requires_grad_(True)
            model = wrap(net)
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05)
        optimizer.zero_grad()
        model(inputs_of(step)[rank::n]).square().mean().backward()
        optimizer.step()
    return net


def replaced_later(wrap: Wrap, rank: int, n: int) -> nn.Module:
    """Another first layer after two steps, then wrapped anew."""
    net = two_layers()
    model = wrap(net)
    for step in range(4):
        if step == 2:
            net[0] = copy.deepcopy(net[0])
            model = wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        optimizer.zero_grad()
        model(inputs_of(step)[rank::n]).square().mean().backward()
        optimizer.step()
    return net


def frozen_in_turn(wrap: Wrap, rank: int, n: int) -> nn.Module:
    """A generator and a critic, which is frozen in each step of the generator."""
    torch.manual_seed(0)
    made = nn.Linear(2, 2).double()
    critic = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    both = wrap(made), wrap(critic)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (made, critic)]
    for step in range(3):
        real, noise = inputs_of(step)[rank::n], inputs_of(step + 10)[rank::n]
        critic.requires_grad_(True)
        optimizers[1].zero_grad()
        fake = both[0](noise)
        (both[1](real).mean() - both[1](fake.detach()).mean()).backward()
        optimizers[1].step()
        critic.requires_grad_(False)
        optimizers[0].zero_grad()
        both[1](both[0](noise)).mean().backward()
        optimizers[0].step()
    return nn.ModuleList((made, *critic[::2]))


def values_copied_in(wrap: Wrap, rank: int, n: int) -> nn.Module:
    """load_state_dict without assign, and pruning, keep the parameters."""
    net = two_layers()
    model = wrap(net)
    net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()})
    prune.l1_unstructured(net[0], "weight", amount=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(2):
        optimizer.zero_grad()
        model(inputs_of(step)[rank::n]).square().mean().backward()
        optimizer.step()
    return net


def inputs_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 2, generator=generator, dtype=torch.float64)


PROGRAMS = (unfrozen_later, replaced_later, frozen_in_turn, values_copied_in)


def by_both(context: RankContext, folder: str) -> Iterator[list[list[Tensor]]]:
    rank, n = begin(context)
    torch_dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=n
    )
    theirs = partial(nn.parallel.DistributedDataParallel, broadcast_buffers=False)
    found = [
        [list(program(wrap, rank, n).parameters()) for program in PROGRAMS]
        for wrap in (dist.DistributedDataParallel, theirs)
    ]
    leave_default_group()
    return [[[p.detach() for p in net] for net in nets] for nets in found]  # type: ignore[return-value]


def test_what_may_change_trains_as_under_torchs_class(
    cluster: Cluster, tmp_path: Path
) -> None:
    everywhere = ranks(cluster, by_both, 2, str(tmp_path))
    for ours, theirs in everywhere:
        for program, own, other, first in zip(
            PROGRAMS, ours, theirs, everywhere[0][0], strict=True
        ):
            for mine, torchs, rank_0 in zip(own, other, first, strict=True):
                assert torch.allclose(mine, torchs, rtol=1e-12), program.__name__
                assert torch.equal(mine, rank_0), program.__name__


# ── copies, and buffers that a graph still needs ────────────────────────────────────


class Scaled(nn.Module):
    """A weight times a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("same", self.scale)

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.weight * self.scale * inputs).sum()


def copies_and_buffers(context: RankContext) -> dict[str, Any]:
    rank, _ = begin(context)
    found: dict[str, Any] = {}
    for find in (False, True):
        model = dist.DistributedDataParallel(
            nn.Linear(1, 1), find_unused_parameters=find
        )
        average = copy.deepcopy(model) if rank == 0 else None  # on one rank only
        with dist.no_sync():
            model(torch.full((1, 1), float(rank))).sum().backward()
        dist.sync_gradients()
        found[f"mean, {find}"] = model.module.weight.grad.item()
        del average
    inner = Scaled()
    model = dist.DistributedDataParallel(inner)
    inner.scale.fill_(1.0 + rank)  # such as a running statistic
    first, second = (model(torch.ones(1)) for _ in range(2))
    first.backward()
    found["first"] = inner.weight.grad.item()
    assert inner.same is inner.scale
    found["buffer"] = inner.scale.item()
    inner.weight.grad = None
    second.backward()
    found["second"] = inner.weight.grad.item()
    kept = inner.scale
    model(torch.ones(1)).backward()
    found["kept"] = inner.scale is kept
    return found


def test_copies_of_one_rank_and_buffers_of_two_forwards(cluster: Cluster) -> None:
    for found in ranks(cluster, copies_and_buffers, 2):
        assert found == {
            "mean, False": 0.5,
            "mean, True": 0.5,
            "first": 1.5,
            "buffer": 1.0,  # rank 0's
            "second": 1.5,  # at the time of its forward()
            "kept": True,  # one forward, one backward: in place
        }


def exchanges(context: RankContext) -> dict[str, Any]:
    rank, n = begin(context)
    comm = dist.default_comm()
    found: dict[str, Any] = {}
    for size in range(1, n + 1):
        if (part := comm.new_group(range(size))) is None:
            continue
        events: list[dict[str, Any]] = []
        journal = Journal(part, events.append)
        told = differing(journal, f"call {rank}", "x" * rank)
        if size > 1:
            assert told == [[f"call {r}", "x" * r] for r in range(size)]
        messages = [event for event in events if event["k"] == "enter"]
        found[f"differ, {size}"] = len(messages)
        assert differing(journal, "call") is None
        events.clear()
        assert differing(journal, "call") is None
        found[f"agree, {size}"] = sum(event["k"] == "enter" for event in events)
    for value in ("1", "0"):
        os.environ["DISTLAB_COMPARE"] = value
        events.clear()
        dist.all_reduce(torch.ones(1), comm=journal)
        found[value] = sum(event.get("bytes") == 16 for event in events)
    with pytest.raises(ValueError, match="bool"):
        dist.all_gather(True, comm=journal)  # type: ignore[arg-type]
    del os.environ["DISTLAB_COMPARE"]
    return found


def test_the_ranks_compare_in_few_messages(cluster: Cluster) -> None:
    for found in ranks(cluster, exchanges, 5):
        assert found.pop("1") > 0
        assert found.pop("0") == 0
        for name, count in found.items():
            kind, _, size = name.partition(", ")
            steps = math.ceil(math.log2(int(size)))
            assert count == steps * (1 if kind == "agree" else 2), name


# ── weights that differ between ranks ───────────────────────────────────────────────


def weights_of_one_rank(context: RankContext) -> dict[str, str]:
    rank, n = begin(context)
    found = {}

    def trained(change: Callable[[nn.Module], None], steps: int = 1) -> str:
        model = dist.DistributedDataParallel(two_layers())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        if rank == n - 1:
            change(model.module)

        def train() -> None:
            for step in range(steps):
                model(torch.full((3, 2), 0.1 * rank + step).double()).sum().backward()
                sgd.step()
                sgd.zero_grad()

        return told(train) or told(model.check_weights)

    @torch.no_grad()
    def negate(net: nn.Module) -> None:
        net[1].weight.neg_()

    def round_off(net: nn.Module) -> None:
        net[0].weight.data *= 1 + 1e-7

    found["before"] = trained(lambda net: nn.init.normal_(net[0].weight))
    found["negated"] = trained(negate)
    found["nan"] = trained(lambda net: nn.init.constant_(net[1].bias, torch.nan))
    found["rounded"] = trained(round_off)
    found["a hundred steps"] = trained(lambda _: None, 102)
    model = dist.DistributedDataParallel(two_layers())
    for step in range(dist.weights.EVERY + 1):
        if step == 1 and rank == n - 1:
            negate(model.module)
        found["later"] = told(lambda: model(torch.ones(1, 2).double()).sum().backward())
        assert (not found["later"]) == (step < dist.weights.EVERY)
    return found


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.bfloat16, torch.float16, torch.float32, torch.float64,
        torch.complex64, torch.complex128,
    ],
)  # fmt: skip
def test_weights_of_every_dtype_are_compared(dtype: torch.dtype) -> None:
    ones = torch.ones(4, dtype=torch.float32).to(dtype)
    ((norm, total),) = dist.weights._summary([ones]).tolist()
    assert norm == pytest.approx(math.log1p(2))
    assert total == pytest.approx(4 / 2)


def test_weights_that_differ_are_named(cluster: Cluster, golden: Golden) -> None:
    all_ranks = ranks(cluster, weights_of_one_rank, 3)
    first = all_ranks[0]
    assert all(found == first for found in all_ranks)
    patterns = {
        "before": r"\b0\.weight\b.* rank 2 ",
        "negated": r"\b1\.weight\b.* rank 2 ",
        "nan": r"\b1\.bias\b.* rank 2 ",
        "later": r"\b1\.weight\b.* rank 2 ",
    }
    for name, pattern in patterns.items():
        assert re.search(f"^DisagreementError: {pattern}", first[name]), first[name]
    assert first["rounded"] == first["a hundred steps"] == ""
    golden("distributed/weights-that-differ", first["before"])
