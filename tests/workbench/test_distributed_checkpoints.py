"""Checkpoints of `distlab.distributed`: bit-equal, at another size, refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import distlab.distributed as dist
from distlab.checkpoints.files import CheckpointError
from distlab.models.mlp import make_mlp
from distlab.runner import Cluster, RankContext
from tests.workbench.distributed_ranks import begin, ranks

NUM_STEPS, HALFWAY, SIZE = 8, 4, 8


class Trainer:
    """Dropout, momentum, a schedule and a shuffled sampler: each has state."""

    def __init__(self) -> None:
        torch.manual_seed(5 + dist.get_rank())
        mlp = nn.Sequential(nn.Dropout(0.3), make_mlp(seed=1))
        self.model = dist.DistributedDataParallel(mlp)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.sampler = dist.DistributedSampler(dataset_size=500, seed=2)
        generator = torch.Generator().manual_seed(3)
        self.data = torch.randn(500, 64, dtype=torch.float64, generator=generator)
        self.indices: Iterator[int] | None = None

    def steps(self, count: int) -> None:
        self.indices = indices = self.indices or iter(self.sampler)
        for _ in range(count):
            batch = self.data[[next(indices) for _ in range(SIZE)]]
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    @property
    def arguments(self) -> tuple[Any, Any]:
        return self.model, self.optimizer

    @property
    def parts(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "sampler": self.sampler}

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def unbroken_and_saved(context: RankContext, folder: str) -> Tensor:
    begin(context)
    trainer = Trainer()
    trainer.steps(HALFWAY)
    dist.save_checkpoint(folder, HALFWAY, *trainer.arguments, **trainer.parts)
    trainer.steps(NUM_STEPS - HALFWAY)
    return trainer.weights()


def resumed(context: RankContext, folder: str, leave_out: str = "") -> Tensor:
    begin(context)
    trainer = Trainer()
    torch.manual_seed(99)
    parts = {name: part for name, part in trainer.parts.items() if name != leave_out}
    step = dist.load_checkpoint(folder, *trainer.arguments, **parts)
    assert step == HALFWAY
    trainer.steps(NUM_STEPS - step)
    return trainer.weights()


def test_a_resume_is_bit_equal_and_each_part_counts(
    cluster: Cluster, tmp_path: Path
) -> None:
    unbroken = ranks(cluster, unbroken_and_saved, 2, str(tmp_path))
    for leave_out in ("", "scheduler", "sampler"):
        found = ranks(cluster, resumed, 2, str(tmp_path), leave_out)
        same = [torch.equal(a, b) for a, b in zip(unbroken, found, strict=True)]
        assert same == [not leave_out] * 2, leave_out


def at_another_size(context: RankContext, folder: str) -> list[Any]:
    begin(context)
    trainer = Trainer()
    parts: dict[str, Any] = {"scheduler": trainer.scheduler}
    step = dist.load_checkpoint(folder, *trainer.arguments, **parts)
    with pytest.raises(ValueError, match=r"num_replicas\b.* 3\b.* 2\b"):
        dist.load_checkpoint(folder, *trainer.arguments, **trainer.parts)
    scaler: Any = trainer.scheduler
    with pytest.raises(ValueError, match="'scaler'"):
        dist.load_checkpoint(folder, *trainer.arguments, scaler=scaler)
    with pytest.raises(ValueError, match="another model"):
        dist.load_checkpoint(folder, nn.Linear(2, 2), trainer.optimizer)
    return [step, trainer.weights()]


def test_another_number_of_ranks_loads_what_it_can(
    cluster: Cluster, tmp_path: Path
) -> None:
    ranks(cluster, unbroken_and_saved, 2, str(tmp_path))
    found = ranks(cluster, at_another_size, 3, str(tmp_path))
    assert [step for step, _ in found] == [HALFWAY] * 3
    assert all(torch.equal(found[0][1], weights) for _, weights in found)


def refusals(context: RankContext, folder: str) -> list[str]:
    rank, _ = begin(context)
    trainer = Trainer()
    taken: Any = {"random": trainer.scheduler}
    sharded: Any = dist.TensorParallel.__new__(dist.TensorParallel)
    place = f"{folder}/{'file' if rank else 'folder'}"  # no folder on rank 1
    said = []
    for arguments, parts, at in [
        ((trainer.model, trainer.optimizer), {}, place),
        ((trainer.model, trainer.optimizer), taken, folder),
        ((sharded, trainer.optimizer), {}, folder),
    ]:
        with pytest.raises((CheckpointError, ValueError)) as refusal:
            dist.save_checkpoint(at, 1, *arguments, **parts)
        said.append(str(refusal.value))
    return said


def test_what_cannot_be_saved_is_refused_on_every_rank(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    for said in ranks(cluster, refusals, 2, str(tmp_path)):
        assert re.match(r"step 1 .*: rank 1: .*file", said[0])
        assert said[1].startswith("'random' ")
        assert "TensorParallel" in said[2]
        assert not any("\n" in line for line in said)


# ── what differs between ranks, and errors on one of them ───────────────────────────


class Part:
    """Whatever state it is given; loading it may fail."""

    def __init__(self, state: Any, error: Exception | None = None) -> None:
        self.state, self.error = state, error

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        if self.error is not None:
            raise self.error


class Counting(nn.Linear):
    """Keeps a number that is neither a parameter nor a buffer."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def small(value: float = 0.0) -> tuple[nn.Module, Any]:
    model = nn.Sequential(Counting(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def bits(model: nn.Module, optimizer: Any) -> list[Any]:
    values = [t.detach().tolist() for t in (*model.parameters(), *model.buffers())]
    state = optimizer.state_dict()["state"]
    return [values, {k: v["exp_avg"].tolist() for k, v in state.items()}]


def told(call: Any) -> str:
    try:
        return str(call())
    except (CheckpointError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def on_two_ranks(context: RankContext, folder: str) -> dict[str, Any]:
    rank, _ = begin(context)
    said: dict[str, Any] = {}
    model, optimizer = small(1.0)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    model[0].calls = 5 + rank  # type: ignore[union-attr]
    own = {"position": 10 + rank, "order": torch.tensor([rank, rank])}
    dist.save_checkpoint(f"{folder}/own", 1, model, optimizer, loader=Part(own))

    again, fresh = small()
    back = Part(None)
    dist.load_checkpoint(f"{folder}/own", again, fresh, loader=back)
    said["back"] = [back.state["position"], back.state["order"].tolist()]
    said["extra"] = again[0].calls  # type: ignore[union-attr]
    said["equal"] = bits(again, fresh) == bits(model, optimizer)

    seen = Part({"seen": {1, 2} if rank else None})
    broken = Part(None)
    broken.state_dict = lambda: 1 // (1 - rank)  # type: ignore[method-assign]
    for name, part in (("unfit", seen), ("broken", broken)):
        place = f"{folder}/{name}"
        said[name] = told(
            lambda p=part, at=place: dist.save_checkpoint(at, 1, model, optimizer, it=p)
        )

    # another state than what was saved: refused before anything has changed
    again, fresh = small(3.0)
    again(torch.ones(3, 2)).sum().backward()
    fresh.step()
    before = bits(again, fresh)
    for name, part, other in (
        ("raises", Part(7, KeyError("x") if rank else None), (again, fresh)),
        ("absent", Part(7), (again, fresh)),
        ("groups", Part(7), (again, torch.optim.AdamW([*again.parameters()][:2]))),
    ):
        parts = {"loader" if name != "absent" else "scaler": part}
        at = f"{folder}/own"
        said[name] = told(
            lambda at=at, o=other, k=parts: dist.load_checkpoint(at, *o, **k)
        )
        said[f"{name} after"] = bits(again, fresh) == before and part.state == 7

    for name, step in (("steps", 3 + rank), ("nodes", 3)):
        at = f"{folder}/{name} {rank if name == 'nodes' else ''}"
        said[name] = told(
            lambda at=at, n=step: dist.save_checkpoint(at, n, model, optimizer)
        )

    at = f"{folder}/alone"
    said["alone"] = told(
        lambda: (
            dist.barrier() if rank else dist.save_checkpoint(at, 1, model, optimizer)
        )
    )
    at = f"{folder}/{'own' if rank else 'none'}"
    said["apart"] = told(lambda: dist.load_checkpoint(at, *small(), loader=Part(7)))
    at = f"{folder}/{'own' if rank else 'file'}"
    said["unread"] = told(lambda: dist.load_checkpoint(at, *small(), loader=Part(7)))
    return said


def test_each_rank_has_its_own_and_an_error_is_everybodys(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    found = ranks(cluster, on_two_ranks, 2, str(tmp_path))
    for rank, said in enumerate(found):
        assert said["back"] == [10 + rank, [rank, rank]]
        assert (said["extra"], said["equal"]) == (5 + rank, True)
        assert re.match(
            r"CheckpointError: .*\b1\b.*rank 1: .*it\.seen.*set", said["unfit"]
        )
        assert re.match(r"CheckpointError: .*rank 1: .*ZeroDivision", said["broken"])
        assert re.match(r"ValueError: .*\[3, 4\]", said["steps"])
        assert re.match(r"CheckpointError: .* 3 .*rank 0 .*rank 1", said["nodes"])
        assert re.match(r"DisagreementError: .*save_.*\bbarrier", said["alone"])
        assert re.search(r"'loader'.*KeyError: 'x'", said["raises"])
        assert ("rank 1: " in said["raises"]) == (rank == 0)
        assert re.match(r"ValueError: .*'scaler'", said["absent"])
        assert re.match(r"ValueError: .*\[4\].*\[2\]", said["groups"])
        assert all(said[f"{name} after"] for name in ("raises", "absent", "groups"))
        assert re.match(
            r"CheckpointError: .*rank 1 step 1\b.*rank 0 none", said["apart"]
        )
        assert ("rank 0: " in said["unread"]) == (rank == 1)
    assert found[0]["unread"].startswith("DiskError: ")
    alone = ranks(cluster, on_one_rank, 1, str(tmp_path / "own"))
    assert re.match(r"ValueError: .*'loader'.* 2 .* 1\b", alone[0])


def on_one_rank(context: RankContext, folder: str) -> str:
    begin(context)
    return told(lambda: dist.load_checkpoint(folder, *small(), loader=Part(None)))


@pytest.fixture
def _alone() -> Any:
    dist.init_process_group(world_size=1, rank=0)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_a_checkpoint_is_found_behind_links_and_never_taken_for_none(
    tmp_path: Path,
) -> None:
    folder, archive = tmp_path / "here", tmp_path / "archive"
    archive.mkdir()
    model, optimizer = small(2.0)
    for step in (7, 8):
        dist.save_checkpoint(folder, step, model, optimizer)
    for path in [*folder.iterdir()]:
        path.rename(archive / path.name)
        path.symlink_to(archive / path.name)
    assert dist.load_checkpoint(folder, *small()) == 8
    (archive / "step-8.json").unlink()
    with pytest.warns(UserWarning, match=r"step-8\.json"):
        assert dist.load_checkpoint(folder, *small()) == 7
    archive.rename(tmp_path / "not mounted")
    with pytest.raises(CheckpointError, match=r"step-8\.json.*step-7\.json"):
        dist.load_checkpoint(folder, *small())
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="link"):
        dist.load_checkpoint(link, *small())


@pytest.mark.usefixtures("_alone")
def test_a_later_checkpoint_and_lost_manifests_are_no_fresh_start(
    tmp_path: Path,
) -> None:
    model, optimizer = small(2.0)
    dist.save_checkpoint(tmp_path, 20, model, optimizer)
    with pytest.raises(CheckpointError, match=r"step 5 .*step 20\b"):
        dist.save_checkpoint(tmp_path, 5, model, optimizer)
    dist.save_checkpoint(tmp_path, 20, model, optimizer)  # once more is no harm
    dist.save_checkpoint(tmp_path, 30, model, optimizer)
    (shard,) = tmp_path.glob("step-30.rank-*")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=shard.name):
        assert dist.load_checkpoint(tmp_path, *small()) == 20
    dist.save_checkpoint(tmp_path, 25, model, optimizer)  # step 30 isn't complete
    for path in tmp_path.glob("*.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"20, 25, 30.*step-30\.json"):
        dist.load_checkpoint(tmp_path, *small())
    for path in tmp_path.glob("step-[23]0.*"):
        path.unlink()
    assert dist.load_checkpoint(tmp_path, *small()) is None, "a first save cut short"


class Counted(nn.Linear):
    """Hooks add the number of calls to the state, and take it out again."""

    def __init__(self, count: int = 0) -> None:
        super().__init__(2, 1)
        self.count = count
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _add(module: Any, state: Any, prefix: str, _: Any) -> None:
        state[f"{prefix}count"] = module.count

    @staticmethod
    def _take(module: Any, state: Any, prefix: str, *_: Any) -> None:
        module.count = state.pop(f"{prefix}count", module.count)


@pytest.mark.usefixtures("_alone")
def test_what_hooks_add_to_a_state_dict_is_saved(tmp_path: Path) -> None:
    def made(count: int) -> tuple[nn.Module, Any]:
        model = nn.Sequential(Counted(count), nn.Linear(1, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = made(7)
    dist.save_checkpoint(tmp_path, 1, model, optimizer)
    again, fresh = made(0)
    assert dist.load_checkpoint(tmp_path, again, fresh) == 1
    assert again[0].count == 7  # type: ignore[index]
    assert torch.equal(again[0].weight, model[0].weight)  # type: ignore[index]


@pytest.mark.usefixtures("_alone")
def test_the_same_model_in_other_wrappers_and_other_models(tmp_path: Path) -> None:
    model, optimizer = small(2.0)
    compiled = torch.compile(small(2.0)[0], backend="eager")
    places = {"plain": (model, optimizer)}
    places["compiled"] = (
        dist.DistributedDataParallel(compiled),  # never called: it would be compiled
        torch.optim.AdamW(compiled.parameters(), lr=0.1),
    )
    for name, (one, its) in places.items():
        inner = compiled._orig_mod if name == "compiled" else one
        inner(torch.ones(3, 2)).sum().backward()
        its.step()
        dist.save_checkpoint(tmp_path / name, 1, one, its)
    for name in places:
        again, fresh = small()
        dist.load_checkpoint(tmp_path / name, again, fresh)
        assert bits(again, fresh) == bits(model, optimizer)
        at, options = tmp_path / name, {"lr": 0.1}
        other = MoreState()
        with pytest.raises(ValueError, match="'extra_state'"):
            dist.load_checkpoint(at, other, torch.optim.AdamW(other.parameters()))
        for wrong, named in (
            (small()[0].double(), r'"0\.weight".*float64.*float32'),
            (without_buffers(), r'"1\.running_mean"'),
        ):
            before = [p.clone() for p in wrong.parameters()]
            its = torch.optim.AdamW(wrong.parameters(), **options)
            with pytest.raises(ValueError, match=named):
                dist.load_checkpoint(at, wrong, its)
            assert all(map(torch.equal, before, wrong.parameters()))
        again, _ = small()
        for other_kind in (torch.optim.SGD, torch.optim.Adam):
            with pytest.raises(ValueError, match=rf"AdamW.*{other_kind.__name__}\b"):
                dist.load_checkpoint(
                    at, again, other_kind(again.parameters(), **options)
                )
        order = [*again.parameters()]
        order[1], order[2] = order[2], order[1]
        with pytest.raises(ValueError, match=r'"0\.bias".*"1\.weight"'):
            dist.load_checkpoint(at, again, torch.optim.AdamW(order, **options))


@pytest.mark.usefixtures("_alone")
def test_models_that_cannot_be_filled_and_steps_that_no_name_has(
    tmp_path: Path,
) -> None:
    model, optimizer = small(1.0)
    for more in ({"step": -1}, {"step": 1.0}, {"step": "1"}, {"keep": 0}):
        ((name, value),) = more.items()
        with pytest.raises(ValueError, match=rf"{name} {value!r}"):
            dist.save_checkpoint(
                tmp_path,
                **{"step": 1, "model": model, "optimizer": optimizer, **more},  # type: ignore[arg-type]
            )
    assert [*tmp_path.iterdir()] == []
    dist.save_checkpoint(tmp_path, np.int64(7), model, optimizer)  # type: ignore[arg-type]
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    for other in (meta, nn.LazyLinear(2)):
        plain = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        with pytest.raises(ValueError, match='"weight"'):
            dist.load_checkpoint(tmp_path, other, plain)
        with pytest.raises(ValueError, match='"weight"'):
            dist.save_checkpoint(tmp_path, 8, other, plain)
    assert dist.load_checkpoint(tmp_path, *small()) == 7


@pytest.mark.usefixtures("_alone")
def test_an_optimizer_of_another_kind_is_refused_as_a_part_too(tmp_path: Path) -> None:
    model, optimizer = small(1.0)
    other = nn.Linear(3, 3)
    its = torch.optim.Adam(other.parameters())
    other(torch.ones(1, 3)).sum().backward()
    its.step()
    dist.save_checkpoint(tmp_path, 1, model, optimizer, its=its)
    parameters = [*model.parameters()]
    grouped = torch.optim.SGD([{"params": parameters}], lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"AdamW.*SGD"):
        dist.load_checkpoint(tmp_path, model, grouped, its=its)
    for wrong, named in (
        (torch.optim.Adam(nn.Linear(2, 2).parameters()), r"\(3, 3\).*\(2, 2\)"),
        (torch.optim.Adam([other.weight]), r"'its'.*\[2\].*\[1\]"),
        (torch.optim.RMSprop(other.parameters()), r"'its'.*'betas'.*RMSprop"),
    ):
        with pytest.raises(ValueError, match=named):
            dist.load_checkpoint(tmp_path, model, optimizer, its=wrong)
    close = torch.optim.AdamW(other.parameters(), amsgrad=True)
    torch.optim.lr_scheduler.StepLR(close, 1)  # adds a setting
    dist.load_checkpoint(tmp_path, model, optimizer, its=close)


class Observed(nn.Linear):
    """Counts its calls where quantization keeps its scales: in state_dict() only."""

    calls = 0

    def _save_to_state_dict(self, found: Any, prefix: str, keep: bool) -> None:
        super()._save_to_state_dict(found, prefix, keep)
        found[f"{prefix}calls"] = torch.tensor(self.calls)

    def _load_from_state_dict(self, found: Any, prefix: str, *more: Any) -> None:
        self.calls = int(found.pop(f"{prefix}calls"))
        super()._load_from_state_dict(found, prefix, *more)


@pytest.mark.usefixtures("_alone")
def test_what_modules_add_to_their_state_dict_is_saved(tmp_path: Path) -> None:
    layers, others = ([Observed(2, 2), Observed(2, 1)] for _ in range(2))
    model, again = nn.Sequential(*layers), nn.Sequential(*others)
    layers[1].calls = 7
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.save_checkpoint(tmp_path, 1, model, optimizer)
    fresh = torch.optim.SGD(again.parameters(), lr=0.1)
    dist.load_checkpoint(tmp_path, again, fresh)
    assert [layer.calls for layer in others] == [0, 7]
    assert torch.equal(others[1].weight, layers[1].weight)


def without_buffers() -> nn.Module:
    model, _ = small()
    model[1] = nn.BatchNorm1d(2, track_running_stats=False)  # type: ignore[operator]
    return model


class MoreState(nn.Sequential):
    """The same parameters, and extra state where the other has none."""

    def __init__(self) -> None:
        super().__init__(Counting(2, 2), nn.BatchNorm1d(2))

    def get_extra_state(self) -> Any:
        return {}
