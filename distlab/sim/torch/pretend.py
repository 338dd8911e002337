"""A pretend GPU for each rank, so that scripts written for GPUs run.

What a script puts on "cuda" stays in this machine's memory. Three things see to that:

    functions of torch.cuda and torch.accelerator, streams and events answer for the
        rank: as many devices as its node has ranks, memory as the rank's own tensors
        take it, time as the clock of the simulation says
    `.to("cuda")`, `.cuda()`, `torch.load` and constructors take the device for the CPU
    any operator that is asked for a tensor on "cuda" makes it here (see flops)

A tensor's `device` is therefore "cpu". As on a GPU, `.cpu()` makes a copy; as for a
tensor that is there already, `.cuda()` does not.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import _device_constructors

from distlab.sim.torch.batch_norm import replace_batch_norm
from distlab.sim.torch.rank import Rank, here
from distlab.sim.torch.replacing import Replaced
from distlab.sim.torch.storages import on_cpu

NAME = "distlab simulated GPU"
MEMORY_BYTES = 80 << 30
_cuda: Any = torch.cuda
_accelerator: Any = torch.accelerator
_torch: Any = torch


@contextmanager
def pretended() -> Iterator[None]:
    """While it lasts, each rank finds a GPU."""
    replaced = Replaced()
    try:
        _replace_queries(replaced)
        _replace_streams(replaced)
        _replace_tensors(replaced)
        _replace_classes(replaced)
        replace_batch_norm(replaced)
        yield
    finally:
        replaced.undo()


def _rank() -> Rank:
    rank = here()
    assert rank is not None
    return rank


# ── questions about the device ──────────────────────────────────────────────────────


def set_device(device: Any) -> None:
    """See `torch.cuda.set_device`.

    Raises:
        RuntimeError: the node has no such device, in CUDA's words.
    """
    if isinstance(device, SimDevice):
        device = device.index
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None:
        return
    if index < 0:
        index += 256  # torch keeps the number in a signed byte
    if not 0 <= index < _rank().per_node:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: this is device {index} of a node "
            f"with {_rank().per_node}"
        )
    _rank().device_index = index


def _stats() -> dict[str, int]:
    return OrderedDict(
        {
            f"{kind}_bytes.all.{when}": number
            for kind in ("allocated", "reserved", "active")
            for when, number in (("current", _live()), ("peak", _peak()))
        }
        | {"num_alloc_retries": 0, "num_ooms": 0}
    )


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        total_memory=MEMORY_BYTES,
        multi_processor_count=132,
        warp_size=32,
        is_integrated=0,
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a call that has no effect here."""


def _constant(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _peak(*args: Any) -> int:
    return _rank().tally.peak_since_reset


def _live(*args: Any) -> int:
    return _rank().tally.live


def _reset_peak(*args: Any) -> None:
    _rank().tally.reset_peak()


def _free(*args: Any) -> tuple[int, int]:
    return MEMORY_BYTES - _live(), MEMORY_BYTES


def _replace_queries(replaced: Replaced) -> None:
    both = {
        "is_available": _constant(True),
        "device_count": lambda: _rank().per_node,
        "synchronize": lambda device=None: _rank().settle(),
        "empty_cache": _nothing,
        "memory_stats": lambda device=None: _stats(),
        "memory_allocated": _live,
        "max_memory_allocated": _peak,
        "memory_reserved": _live,
        "max_memory_reserved": _peak,
        "reset_peak_memory_stats": _reset_peak,
        "get_device_capability": _constant((9, 0)),
    }
    of_cuda = {
        "is_initialized": _constant(True),
        "_lazy_init": _nothing,
        "init": _nothing,
        "set_device": set_device,
        "current_device": lambda: _rank().device_index,
        "get_device_name": _constant(NAME),
        "get_device_properties": _properties,
        "is_bf16_supported": _constant(True),
        "is_tf32_supported": _constant(True),
        "can_device_access_peer": _constant(True),
        "memory_summary": lambda *args, **kwargs: str(dict(_stats())),
        "mem_get_info": _free,
        "reset_max_memory_allocated": _reset_peak,
        "reset_max_memory_cached": _reset_peak,
        "set_per_process_memory_fraction": _nothing,
        "ipc_collect": _nothing,
        "is_current_stream_capturing": _constant(False),
        "utilization": _constant(0),
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "seed_all": _nothing,
        "initial_seed": _constant(0),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    }
    of_accelerators: dict[str, Any] = {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: _rank().device_index,
        "current_device_idx": lambda: _rank().device_index,
        "set_device_index": set_device,
        "set_device_idx": set_device,
        "get_memory_info": _free,
    }
    for owner, own in (
        (_cuda, of_cuda),
        (_cuda.memory, of_cuda),
        (_accelerator, of_accelerators),
    ):
        for name, ours in {**both, **own}.items():
            replaced.for_ranks(owner, name, ours)
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        replaced.for_ranks(_cuda.nvtx, name, _nothing)
    replaced.for_ranks(_cuda.nccl, "version", _constant((2, 27, 3)))
    replaced.for_ranks(
        distributed_c10d,
        "_get_default_timeout",
        _constant(dist.constants.default_pg_nccl_timeout or timedelta(minutes=10)),
    )
    replaced.for_ranks(dist, "is_nccl_available", _constant(True))
    replaced.for_ranks(distributed_c10d, "is_nccl_available", _constant(True))
    for name in ("CUDAGraph", "graph", "make_graphed_callables"):
        why = (
            "a CUDA graph is recorded by a GPU's driver. Leave it out, as in a CPU run"
        )
        replaced.refuse(_cuda, name, f"torch.cuda.{name}", why)


# ── streams and events ──────────────────────────────────────────────────────────────


class SimStream:
    """A stream of work: here all of it is done at once, in order."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cuda", _rank().device_index)
        self.priority, self.cuda_stream, self.stream_id = priority, 0, 0

    def __enter__(self) -> SimStream:
        return self

    def __exit__(self, *args: object) -> None: ...

    def query(self) -> bool:
        """Whether all is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being recorded: never."""
        return False

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        """See `torch.cuda.Stream.record_event`."""
        event = event or SimEvent()
        event.record()
        return event

    def synchronize(self) -> None:
        """See `torch.cuda.Stream.synchronize`."""
        _rank().settle()

    wait_stream = wait_event = _nothing


class SimEvent:
    """A point in a stream; its time is that of the simulation's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at_s: float | None = None

    def record(self, stream: Any = None) -> None:
        """See `torch.cuda.Event.record`."""
        self._at_s = _rank().now_s()

    def elapsed_time(self, end_event: SimEvent) -> float:
        """Milliseconds until `end_event`.

        Raises:
            RuntimeError: one of them has not been recorded.
        """
        if self._at_s is None or end_event._at_s is None:
            raise RuntimeError("Both events must be recorded before calculating time")
        return 1e3 * (end_event._at_s - self._at_s)

    def query(self) -> bool:
        """Whether it has passed."""
        return True

    def synchronize(self) -> None:
        """See `torch.cuda.Event.synchronize`."""
        _rank().settle()

    wait = _nothing


class SimDevice:
    """See `torch.cuda.device`: a block in which another device is the current one."""

    def __init__(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        self.index = _rank().device_index if index is None else index
        self._before = 0

    def __enter__(self) -> SimDevice:
        self._before = _rank().device_index
        set_device(self.index)
        return self

    def __exit__(self, *args: object) -> None:
        _rank().device_index = self._before


def _replace_streams(replaced: Replaced) -> None:
    for name, ours in (
        ("Stream", SimStream),
        ("Event", SimEvent),
        ("device", SimDevice),
    ):
        replaced.put(_cuda, name, ours)
    replaced.put(_accelerator, "device_index", SimDevice)
    replaced.put(_torch, "Stream", SimStream)
    replaced.put(_torch, "Event", SimEvent)
    replaced.put(_cuda, "ExternalStream", SimStream)
    for owner in (_cuda, _accelerator):
        replaced.for_ranks(owner, "current_stream", lambda device=None: SimStream())
        replaced.for_ranks(owner, "set_stream", _nothing)
    replaced.for_ranks(_cuda, "default_stream", lambda device=None: SimStream())
    replaced.for_ranks(
        _cuda, "stream", lambda stream: nullcontext() if stream is None else stream
    )


# ── tensors ─────────────────────────────────────────────────────────────────────────


def _to(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = [arg for arg in (*args[:1], kwargs.get("device")) if arg is not None]
    off = any(isinstance(w, (str, torch.device)) and str(w) == "cpu" for w in wanted)
    if off and _expects_a_copy(sys._getframe(2)):
        kwargs.setdefault("copy", True)
    return _moved(original, tensor, *args, **kwargs)


def _moved(original: Any, this: Any, *args: Any, **kwargs: Any) -> Any:
    """For `to` of a tensor or a module."""
    if args and not isinstance(args[0], torch.dtype):
        args = (on_cpu(args[0]), *args[1:])
    return _with_device(original, this, *args, **kwargs)


def _copied(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    copy = original(tensor, *args, **kwargs)
    return copy.clone() if _expects_a_copy(sys._getframe(2)) else copy


def _expects_a_copy(frame: FrameType) -> bool:
    """Whether the caller takes a tensor off its GPU, and may then change that one.

    The user's code may. FSDP 1 frees the memory of a parameter that it has offloaded.
    """
    return (
        _rank().is_users(frame)
        or frame.f_globals.get("__name__") == "torch.distributed.fsdp._flat_param"
    )


def _itself(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor


def _with_device(original: Any, *args: Any, **kwargs: Any) -> Any:
    if "device" in kwargs:
        kwargs["device"] = on_cpu(kwargs["device"])
    return original(*args, **kwargs)


def _load(original: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) > 1:
        kwargs["map_location"], args = args[1], (args[0], *args[2:])
    place = kwargs.get("map_location")
    if isinstance(place, dict):
        kwargs["map_location"] = "cpu"
    elif not callable(place):
        kwargs["map_location"] = on_cpu(place)
    return original(*args, **kwargs)


def _replace_tensors(replaced: Replaced) -> None:
    tensor: Any = torch.Tensor
    replaced.with_original(tensor, "to", _to)
    replaced.with_original(tensor, "cpu", _copied)
    for name in ("cuda", "pin_memory"):
        replaced.for_ranks(tensor, name, _itself)
    replaced.for_ranks(tensor, "record_stream", _nothing)
    storage: Any = torch.storage._StorageBase
    replaced.for_ranks(storage, "cuda", _itself)
    # An operator that is asked for "cuda" makes its tensor here (see flops), but a
    # number, as in `device=local_rank`, torch refuses before it comes to that.
    for make in {*_device_constructors(), torch.asarray}:
        name = make.__name__
        if getattr(_torch, name, None) is make:
            replaced.with_original(_torch, name, _with_device)
    replaced.put(_torch, "device", _Device)
    replaced.put(_torch, "Generator", _Generator)
    replaced.with_original(_torch, "load", _load)


class _KindOfGenerator(type(torch.Generator)):  # type: ignore[misc]
    """Makes torch's own generators, whatever the device."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _OneGenerator(on_cpu(device))

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, _OneGenerator)


_OneGenerator = torch.Generator


class _Generator(torch.Generator, metaclass=_KindOfGenerator):
    """In the place of `torch.Generator`."""


def _representable(*args: Any) -> tuple[Any, ...]:
    """The same device by a number that torch can keep, in a signed byte.

    A node may have more than 128 ranks, and torch shows device 128 as -128. We take
    that number for the same device. Torch has no number for device 255, because -1
    stands for the current device, so device 254 serves for both.
    """
    match args:
        case (str(text),) if text.partition(":")[2].isdecimal():
            kind, _, number = text.partition(":")
            index = int(number)
        case (str(kind), int(index)):
            pass
        case _:
            return args
    if -1 <= index < 128:
        return args
    return kind, min(index % 256, 254)


class _KindOfDevice(type):
    """Makes torch's own devices; a number alone is that of a GPU."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        if here() is not None:
            if args and type(args[0]) is int:
                args = ("cuda", *args)
            args = _representable(*args)
        return _OneDevice(*args, **kwargs)

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, _OneDevice)


_OneDevice = torch.device


class _Device(metaclass=_KindOfDevice):
    """In the place of `torch.device`."""


_Device.__module__, _Device.__name__, _Device.__qualname__ = "torch", "device", "device"


# ── classes of torch that look at the device ────────────────────────────────────────


def _first_on_cpu(original: Any, this: Any, *args: Any, **kwargs: Any) -> None:
    """For a constructor whose first argument is the kind of device."""
    if args:
        args = (on_cpu(args[0]), *args[1:])
    for name in ("device", "device_type"):
        if name in kwargs:
            kwargs[name] = on_cpu(kwargs[name])
    original(this, *args, **kwargs)


def _autocast(
    original: Any, this: Any, device_type: str, dtype: Any = None, *args: Any,
    **kwargs: Any,
) -> None:  # fmt: skip
    if dtype is None and on_cpu(device_type) != device_type:
        dtype = torch.get_autocast_dtype("cuda")
    original(this, on_cpu(device_type), dtype, *args, **kwargs)


def _ddp(
    original: Any, this: Any, module: Any, device_ids: Any = None,
    output_device: Any = None, *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    original(this, module, None, None, *args, **kwargs)


def _init_group(original: Any, *args: Any, **kwargs: Any) -> None:
    kwargs.pop("device_id", None)
    original(*args, **kwargs)


def _mesh(original: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
    return original(on_cpu(device_type), *args, **kwargs)


def _fsdp(original: Any, this: Any, *args: Any, **kwargs: Any) -> None:
    kwargs["device_id"] = torch.device("cpu")
    original(this, *args, **kwargs)


def _loader(original: Any, this: Any, *args: Any, **kwargs: Any) -> None:
    kwargs.pop("pin_memory", None)
    kwargs.pop("pin_memory_device", None)
    original(this, *args, **kwargs)


def _replace_classes(replaced: Replaced) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp import _init_utils as fsdp_init

    for kind, ours in (
        (torch.amp.autocast_mode.autocast, _autocast),
        (torch.amp.grad_scaler.GradScaler, _first_on_cpu),
        (DistributedDataParallel, _ddp),
        (FullyShardedDataParallel, _fsdp),
        (device_mesh.DeviceMesh, _first_on_cpu),
        (torch.utils.data.DataLoader, _loader),
    ):
        replaced.with_original(kind, "__init__", ours)
    replaced.for_ranks(
        torch.cuda.amp.common, "amp_definitely_not_available", _constant(False)
    )
    replaced.for_ranks(
        fsdp_init, "_check_module_states_for_sync_module_states", _nothing
    )
    replaced.with_original(torch.nn.Module, "to", _moved)
    replaced.with_original(torch.nn.Module, "to_empty", _with_device)
    for owner in (distributed_c10d, dist):
        replaced.with_original(owner, "init_process_group", _init_group)
    for owner in (device_mesh, dist):
        replaced.with_original(owner, "init_device_mesh", _mesh)
    replaced.put(torch.version, "cuda", torch.version.cuda or "12.8")
