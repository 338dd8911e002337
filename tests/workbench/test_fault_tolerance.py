"""Checkpoints: the format, all crashes of the reference, and three wrong saves."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from distlab import curriculum
from distlab.checkpoints import files as given
from distlab.checkpoints.training_state import pack, unpack
from distlab.comm import Disk
from distlab.grading.checks.fault_tolerance.disks import (
    complete_steps,
    files_of_step,
    play_on_disk,
    tensors_of,
)
from distlab.sim import SimDisk, crash_points

Tell = Callable[[Any], None]
EVERY_DTYPE = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.fixture(scope="module")
def unit() -> ModuleType:
    return curriculum.load("fault_tolerance", "reference")


def tensors() -> dict[str, torch.Tensor]:
    odd = {str(dtype): torch.ones(3).to(dtype) for dtype in EVERY_DTYPE}
    return odd | tensors_of(0, 30, 1)


# ── the format ──────────────────────────────────────────────────────────────────────


def test_the_safetensors_package_opens_a_shard(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    path = tmp_path / "shard.safetensors"
    path.write_bytes(given.encode_shard(tensors(), {"step": 30}))
    opened = package.load_file(path)
    assert opened.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert opened[name].dtype == tensor.dtype
        assert torch.equal(opened[name], tensor)


def test_a_file_of_the_safetensors_package_is_read() -> None:
    package = pytest.importorskip("safetensors.torch")
    own = {name: tensor.contiguous().clone() for name, tensor in tensors().items()}
    shard = given.decode_shard(package.save(own, {"format": "pt"}))
    assert shard.meta == {}
    assert all(torch.equal(shard.tensors[name], own[name]) for name in own)


def test_a_pickle_is_refused_in_one_line() -> None:
    for data in (pickle.dumps({"weight": 1}), b"PK\x03\x04 a file of torch.save"):
        with pytest.raises(ValueError, match=r"\bpickle\b") as refused:
            given.decode_shard(data)
        assert "\n" not in str(refused.value)
        with pytest.raises(ValueError, match=r"\bpickle\b"):
            given.decode_manifest(data)


def test_every_truncation_of_a_shard_is_refused() -> None:
    data = given.encode_shard(tensors_of(0, 30, 1), {"step": 30})
    for length in range(len(data)):
        with pytest.raises(ValueError, match="torn"):
            given.decode_shard(data[:length])


def test_a_dtype_without_a_name_and_a_meta_that_is_no_json_are_refused() -> None:
    with pytest.raises(TypeError, match="complex128"):
        given.encode_shard({"a": torch.zeros(1, dtype=torch.complex128)}, {})
    with pytest.raises(TypeError):
        given.encode_shard({}, {"a": object()})


def test_a_nested_state_comes_back_shared_out_over_the_ranks() -> None:
    shared = {"weights": {str(i): torch.randn(i + 1) for i in range(5)}, "lr": 0.1}
    own = [
        {"state": (3, (1, 2), None), "by": {7: [torch.tensor(r)], "x": True}}
        for r in range(3)
    ]
    shards = []
    for rank in range(3):
        data = given.encode_shard(*pack(shared, own[rank], rank, 3))
        shards.append(given.decode_shard(data))
    assert sum("shared.weights" in name for s in shards for name in s.tensors) == 5
    found, owns = unpack(given.Checkpoint(step=1, shards=tuple(shards)))
    assert found["lr"] == 0.1
    assert all(
        torch.equal(found["weights"][n], t) for n, t in shared["weights"].items()
    )
    assert owns == own


def test_entries_whose_names_are_alike_stay_apart() -> None:
    one, two, three, four = (torch.tensor([float(i)]) for i in range(4))
    state = {
        "a.b": one,
        "a": {"b": two},
        0: three,
        "0": four,
        "c": [one],
        "c.0": two,
        "x": {"y.z": one},
        "x.y": {"z": two},
    }
    shuffled = dict(reversed(state.items()))
    data = [given.encode_shard(*pack({}, it, 0, 1)) for it in (state, shuffled)]
    for bytes_ in data:
        shard = given.decode_shard(bytes_)
        _, (found,) = unpack(given.Checkpoint(step=1, shards=(shard,)))
        assert found == state
        assert list(shard.tensors) == list(given.decode_shard(data[0]).tensors)


def test_numbers_of_numpy_and_lazy_tensors_come_back() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    state = {
        "decay": np.logspace(-4, -2, 3)[0],
        "count": np.int64(7),
        "half": np.float16(0.1),
        "flag": np.bool_(True),
        "conj": z.conj(),
        "negative": z.conj().imag,
        "strided": z.conj().imag[::2],
    }
    data = given.encode_shard(*pack(state, {}, 0, 1))
    shards = (given.decode_shard(data),)
    found, _ = unpack(given.Checkpoint(step=1, shards=shards))
    for name, value in state.items():
        assert type(found[name]) is type(value)
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value))


def test_an_object_that_is_no_plain_data_is_refused_by_its_name() -> None:
    tensors, meta = pack({}, {"a": {"b": object()}}, 0, 1)
    with pytest.raises(TypeError, match=r'"own\.a\.b"'):  # by then all ranks are there
        given.encode_shard(tensors, meta)


# ── crashes ─────────────────────────────────────────────────────────────────────────


def saving(save: Callable[..., None], size: int, step: int) -> Callable[..., None]:
    """A program for crash_points: `size` ranks save one step."""

    def program(disk: Disk, tell: Tell) -> None:
        def rank(context: Any) -> None:
            own = tensors_of(context.rank, step, 1)
            save(context.comm, disk, step, own, {}, keep=1)
            tell(step)

        assert play_on_disk(rank, size, disk)[1] == ""

    return program


@pytest.mark.parametrize("size", [1, 2, 3])
def test_after_every_crash_of_a_save_the_new_or_the_old_one_loads(
    unit: ModuleType, size: int
) -> None:
    old, count, steps = files_of_step(20, size, 1), 0, set()
    for point in crash_points(saving(unit.save, size, 30), files=old, limit=100):
        loaded = unit.load(point.disk())
        assert loaded is not None
        assert loaded.step == 30 if point.told else loaded.step in (20, 30)
        assert loaded.world_size == size
        count += 1
        steps.add(loaded.step)
    assert steps == {20, 30}
    assert count > 60 * size


def without(name: str) -> Callable[[Disk, str, bytes], None]:
    """write_file without one of its calls."""

    def write_file(disk: Disk, path: str, data: bytes) -> None:
        temporary = path if name == "rename" else path + ".tmp"
        disk.write(temporary, data)
        if name != "sync":
            disk.sync(temporary)
        if name != "rename":
            disk.rename(temporary, path)
        if name != "sync_folder":
            disk.sync_folder()

    return write_file


@pytest.mark.parametrize("name", ["sync", "rename", "sync_folder"])
def test_a_save_without_one_call_loses_a_checkpoint_at_some_crash(
    unit: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit, "write_file", without(name))
    lost = [
        point
        for point in crash_points(
            saving(unit.save, 2, 30), files=files_of_step(30, 2, 2), limit=100
        )
        if 30 not in complete_steps(point.files)
    ]
    assert lost


def test_flipped_bits_are_refused(unit: ModuleType) -> None:
    files = files_of_step(20, 2, 1) | files_of_step(30, 2, 1)
    names, drawing = sorted(files_of_step(30, 2, 1)), random.Random(0)
    for _ in range(100):
        name = drawing.choice(names)
        data = bytearray(files[name])
        data[drawing.randrange(len(data))] ^= 1 << drawing.randrange(8)
        loaded = unit.load(SimDisk(files | {name: bytes(data)}))
        assert loaded.step == 20
        assert loaded.refused[0].startswith(name)


def test_a_step_that_is_saved_again_leaves_the_first_one_until_the_end(
    unit: ModuleType,
) -> None:
    old = files_of_step(30, 2, 2)  # other values of the same step, and no older one
    program = saving(unit.save, 2, 30)
    for point in crash_points(program, files=old, limit=100):
        assert complete_steps(point.files) == [30]


# ── copies in memory ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.arange(6).to(dtype) for dtype in EVERY_DTYPE),
        torch.arange(12.0).view(3, 4).T,
        torch.arange(12.0)[::2],
        torch.arange(3.0).expand(2, 3),
        torch.empty(0),
        torch.tensor(2.5),
        torch.nn.Parameter(torch.arange(3.0)),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,  # it has the negative bit
    ],
)
def test_copies_have_the_values_of_now_and_use_their_memory_again(
    tensor: torch.Tensor,
) -> None:
    copies, before = given.Copies(), tensor.detach().clone()
    first = copies.of({"w": tensor})["w"]
    assert torch.equal(first, before)
    assert not first.requires_grad
    if tensor.numel():
        tensor.data = before.logical_not().to(tensor.dtype)
    assert torch.equal(first, before)
    again = copies.of({"w": tensor})["w"]
    assert torch.equal(again, tensor)
    assert again.data_ptr() == first.data_ptr()
