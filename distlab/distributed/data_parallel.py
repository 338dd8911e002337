"""Phase 3's DistributedDataParallel behind torch's names, and all its wrappers.

    forward()     the unit's; from now on this rank has a batch in this step
    backward()    the unit's hooks send the buckets; .grad is the mean when it returns
    no_sync()     .grad is this rank's own sum, until sync_gradients() or a backward()
                  outside

When a rank has run out of batches, it takes part in the remaining steps through join(),
or by calling zero_loss() in each of them. Both compute the mean over the ranks that
still have a batch, so they need find_unused_parameters=True.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from distlab.comm import Comm, Work
from distlab.distributed import registry
from distlab.distributed.agreement import agreed, describe
from distlab.distributed.ddp_changes import Seen, set_aside_buffers
from distlab.distributed.group import default_comm
from distlab.distributed.model_parallel import PipelineParallel, TensorParallel
from distlab.distributed.parts import running, unit
from distlab.distributed.weights import EVERY, require_equal_weights
from distlab.given.distributed_data_parallel import contiguous, tensors_in


class DistributedDataParallel(nn.Module):
    """Wrap a module so that backward() leaves the mean over the ranks in every .grad.

    Collective: every rank constructs it with the same arguments and a module of the
    same architecture, and the ranks check that they do. Every rank starts with rank 0's
    parameters and buffers. You can also set `bucket_size_mib` under the names
    `bucket_size_mb` and torch's `bucket_cap_mb`. `device_ids` names the module's GPU,
    as in torch, and forward() moves the inputs there. `comm_hook(comm, bucket) -> Work`
    replaces the all_reduce of a bucket. With `find_unused_parameters`, some parameters
    may get no gradient, and some ranks may have no batch.

    Don't unfreeze, add, replace or convert parameters afterwards, because we would no
    longer average their gradients. If you do, forward() refuses the module. Instead,
    wrap the changed module in a new DistributedDataParallel, which takes over from this
    one. When you change weights or learning rates, do it on all ranks alike. The first
    and then every 100th synchronized backward() checks that the ranks still have equal
    parameters, and check_weights() does so at once. A deepcopy, such as an average of
    the weights, takes part in sync_gradients() only after its own first backward(), so
    a single rank may keep one.

    Raises:
        ValueError: on every rank, if the ranks' modules or arguments differ in a name,
            the order, a shape, a dtype, or requires_grad. Also if a parameter is lazy
            or on the meta device, the module is already wrapped, you pass two names of
            the bucket size, device_ids isn't where the module is, or the unit refuses
            an argument.
        RuntimeError: in forward(), if the parameters have changed.
        DisagreementError: in backward(), on every rank, if a parameter's values differ
            between ranks.

    Example:
        init_process_group()
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(3, 2) * get_rank()).sum().backward()
        mean = 3 * (get_world_size() - 1) / 2
        assert model.module.weight.grad.tolist() == [[mean, mean]]
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        bucket_size_mib: float | None = None,
        find_unused_parameters: bool = False,
        *,
        bucket_size_mb: float | None = None,
        bucket_cap_mb: float | None = None,
        device_ids: Sequence[int | str | torch.device] | None = None,
        broadcast_buffers: bool = True,
        comm_hook: Any = None,
    ) -> None:
        comm = comm or default_comm()
        named = {
            "bucket_size_mb": bucket_size_mb,
            "bucket_cap_mb": bucket_cap_mb,
            "bucket_size_mib": bucket_size_mib,
        }
        sizes = {name: size for name, size in named.items() if size is not None}
        options = {
            "bucket_size_mib": next(iter(sizes.values()), 25.0),
            "find_unused_parameters": find_unused_parameters,
            "broadcast_buffers": broadcast_buffers,
        }

        def described() -> str:
            if len(sizes) > 1:
                raise ValueError(
                    f"{' and '.join(sizes)} are the same size: give one of them"
                )
            _expect_device(module, device_ids)
            _refuse_wrapped(module, comm)
            told = [f"{name}={value}" for name, value in options.items()]
            told.append(f"comm_hook={_name_of(comm_hook)}")
            return "\n".join((describe(module), *told))

        advice = "give every rank the same model and the same arguments"
        agreed(comm, described, advice)
        super().__init__()
        self.module = module
        self._moves_inputs = device_ids is not None
        # Not a submodule: its parameters are those of `module`, under other names.
        engine = _engine_class()(module, comm, **options, comm_hook=comm_hook)
        self.__dict__["engine"] = engine
        _take_over(engine)
        registry.add(self)

    @property
    def num_buckets(self) -> int:
        """Return the number of messages that a synchronized backward() sends."""
        return len(self.__dict__["engine"].buckets)

    @property
    def comm_hook(self) -> Any:
        """Return the hook that sends a bucket; checkpoints save its state."""
        return self.__dict__["engine"].comm_hook

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs of the module.

        Raises:
            RuntimeError: the module's parameters have changed since it was wrapped.
        """
        engine = self.__dict__["engine"]
        if self._moves_inputs:
            device = next(self.module.parameters()).device
            inputs, named = tree_map_only(
                Tensor, lambda own: own.to(device), (inputs, named)
            )
        if not torch.is_grad_enabled():
            return engine(*inputs, **named)
        engine.seen.require_unchanged(self.module, engine.is_replaced)
        engine.has_batch = True
        outputs = engine(*inputs, **named)
        engine.await_backward(outputs)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward() only add to .grad in this block, without sending anything.

        The ranks may accumulate different numbers of batches, so you may enter this
        block on a single rank. But on every rank, call optimizer.step() only after a
        backward() outside of it. Otherwise the weights of the ranks diverge, which the
        next check of the weights reports.

        Example:
            init_process_group()
            model = DistributedDataParallel(torch.nn.Linear(1, 1))
            with model.no_sync():
                model(torch.full((1, 1), float(get_rank()))).sum().backward()
            assert model.module.weight.grad.item() == get_rank()
        """
        with running(), self.__dict__["engine"].no_sync():
            yield

    def join(self) -> Iterator[None]:
        """Yield once per step that other ranks run after this rank's last batch.

        Call it on every rank at the end of its loop. Gradients are then the mean over
        the ranks that have a batch.

        Raises:
            ValueError: find_unused_parameters is False.

        Example:
            init_process_group()
            model = DistributedDataParallel(
                torch.nn.Linear(1, 1), find_unused_parameters=True
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(get_rank() + 1):  # unequal numbers of batches
                optimizer.zero_grad()
                model(torch.ones(4, 1)).sum().backward()
                assert model.module.weight.grad.item() == 4
                optimizer.step()
            for _ in model.join():
                assert model.module.weight.grad.item() == 4
                optimizer.step()
        """
        with running(ValueError):
            yield from self.__dict__["engine"].join()

    def zero_loss(self) -> Tensor:
        """Return a loss of zero for a step without a batch here; call backward() on it.

        The gradients are then the mean over the ranks that have a batch. You can write
        the same loss as 0 * the sum of all parameters. A loss that just happens to have
        the value zero, however, counts as a batch.

        Raises:
            ValueError: find_unused_parameters is False.

        Example:
            init_process_group()
            model = DistributedDataParallel(
                torch.nn.Linear(1, 1), find_unused_parameters=True
            )
            has_batch = get_rank() == 0
            loss = model(torch.ones(4, 1)).sum() if has_batch else model.zero_loss()
            loss.backward()
            assert model.module.weight.grad.item() == 4
        """
        engine = self.__dict__["engine"]
        if not engine.find_unused_parameters:
            raise ValueError("zero_loss() needs find_unused_parameters=True")
        zeros = [parameter.flatten()[:1].sum() * 0.0 for parameter in engine.trainable]
        return torch.stack([zero.double() for zero in zeros]).sum()

    def sync_gradients(self) -> None:
        """Make .grad the mean over the ranks now, if it is not already; collective.

        Use it for gradients added under no_sync(). After a backward() that has already
        synchronized, it does nothing.

        Example:
            init_process_group()
            model = DistributedDataParallel(torch.nn.Linear(1, 1))
            with model.no_sync():
                model(torch.full((1, 1), float(get_rank()))).sum().backward()
            model.sync_gradients()
            model.sync_gradients()  # nothing is left to do
            assert model.module.weight.grad.item() == (get_world_size() - 1) / 2
        """
        with running():
            self.__dict__["engine"].sync_gradients()

    def check_weights(self) -> None:
        """Require that all ranks have the same parameters, up to rounding; collective.

        Buffers may differ, because each rank's batch norm sees its own batches.

        Raises:
            DisagreementError: on every rank; it names a parameter and the ranks that
                don't have rank 0's values.

        Example:
            init_process_group()
            model = DistributedDataParallel(torch.nn.Linear(2, 1))
            with torch.no_grad():
                model.module.weight.zero_()  # on every rank
            model.check_weights()
        """
        require_equal_weights(self.__dict__["engine"].comm, self.module)

    def reset(self) -> None:
        """Forget a backward() that lost a peer, because the group has changed."""
        engine = self.__dict__["engine"]
        engine.num_synced = 0  # a rank that joins now begins at 0
        engine.__dict__ |= {"arrived": set(), "unused": [], "usage_work": None}
        engine.active = list(range(engine.comm.world_size))
        engine.has_batch = engine.is_stale = engine.expects_end = False
        engine.pending.clear()
        engine.versions.clear()
        engine.num_launched = 0
        for bucket in engine.buckets:
            # A transfer of the old group may still write into its buffer.
            bucket.flat = torch.empty_like(bucket.flat)
            bucket.num_ready, bucket.work = 0, None

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """Copy the wrapper and its module on this rank's comm; send nothing."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        engine = twin.__dict__["engine"]
        engine.takes_part = False  # maybe only this rank has made a copy
        _ENGINES.add(engine)
        registry.add(twin)
        return twin

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: save module.state_dict()"
        )


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Enter `no_sync()` of every DistributedDataParallel of this process.

    Example:
        init_process_group()
        models = [DistributedDataParallel(torch.nn.Linear(1, 1)) for _ in range(2)]
        mine = torch.full((1, 1), float(get_rank()))
        with no_sync():
            sum(model(mine).sum() for model in models).backward()
        assert all(m.module.weight.grad.item() == get_rank() for m in models)
    """
    with contextlib.ExitStack() as stack:
        for wrapper in wrappers():
            stack.enter_context(wrapper.no_sync())
        yield


def sync_gradients() -> None:
    """Call `sync_gradients()` of all this process's wrapped models; collective.

    Example:
        init_process_group()
        models = [DistributedDataParallel(torch.nn.Linear(1, 1)) for _ in range(2)]
        mine = torch.full((1, 1), float(get_rank()))
        with no_sync():
            sum(model(mine).sum() for model in models).backward()
        sync_gradients()
        mean = (get_world_size() - 1) / 2
        assert all(m.module.weight.grad.item() == mean for m in models)
    """
    for wrapper in wrappers():
        if wrapper.__dict__["engine"].takes_part:
            wrapper.sync_gradients()


def wrappers() -> list[DistributedDataParallel]:
    """Return this process's wrappers in the order of their construction."""
    return [
        wrapper
        for wrapper in registry.alive()
        if isinstance(wrapper, DistributedDataParallel)
        and not wrapper.__dict__["engine"].is_replaced
    ]


def _refuse_wrapped(module: nn.Module, comm: Comm) -> None:
    for part in module.modules():
        if not isinstance(part, TensorParallel | PipelineParallel):
            continue
        if part.comm is comm and comm.world_size > 1:
            raise ValueError(
                f"the ranks of a {type(part).__name__} have different parts of the "
                "model, which a DistributedDataParallel over the same ranks would make "
                "equal: give it the ranks with equal parts, as comm"
            )
    if isinstance(
        module, DistributedDataParallel | nn.parallel.DistributedDataParallel
    ):
        raise ValueError("the module is a DistributedDataParallel: give its .module")


def _expect_device(
    module: nn.Module, ids: Sequence[int | str | torch.device] | None
) -> None:
    if ids is None:
        return
    own = {p.device for p in module.parameters()}
    given = [
        torch.device("cuda", one) if isinstance(one, int) else torch.device(one)
        for one in ids
    ]
    if own == set(given) and len(given) == 1 and given[0].type == "cuda":
        return
    shown = ", ".join(sorted(map(str, own)))
    raise ValueError(
        f"device_ids is {list(ids)}, must be the one GPU of the module, which is on "
        f"{shown}: move the module there first, or leave device_ids out"
    )


def _name_of(hook: Any) -> str:
    if hook is None:
        return "None"
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _take_over(engine: Any) -> None:
    """Silence older engines with the same parameters from now on.

    We ignore parameters that the older engine's module no longer has.
    """
    own = set(engine.module.parameters())
    for older in _ENGINES:
        left = set(older.module.parameters()).intersection(older.trainable)
        if left and left <= own:
            older.is_replaced = True
    _ENGINES.add(engine)


_ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()


# ── the unit's class, and what the library adds to it ───────────────────────────────


def _engine_class() -> Any:
    """Return a subclass of the unit's DistributedDataParallel."""
    base = unit("distributed_data_parallel").DistributedDataParallel
    members = {name: added(base) for name, added in _ADDED.items()}
    members |= {"sync_gradients": _sync_gradients, "await_backward": _await_backward}
    return type("Engine", (base,), members)


def _init(base: Any) -> Any:
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        self.__dict__["has_batch"] = False  # forward() has run in this step
        self.__dict__["is_stale"] = False  # .grad is this rank's own, not yet the mean
        self.__dict__["is_replaced"] = False  # True once a newer engine takes over
        self.__dict__["takes_part"] = True  # in the global sync_gradients()
        self.__dict__["pending"] = set()  # forward()s whose backward() hasn't begun
        self.__dict__["num_forwards"] = 0
        self.__dict__["num_synced"] = 0  # backward()s whose gradients were averaged
        self.__dict__["versions"] = {}  # of each parameter when its gradient arrived
        with running(ValueError):
            base.__init__(self, *arguments, **named)
        self.__dict__["seen"] = Seen(self.module)

    return __init__


def _on_gradient(base: Any) -> Any:
    def on_gradient(self: Any, parameter: Tensor) -> None:
        if self.is_replaced:
            return
        self.takes_part = True
        if self.syncs:
            _require_own_gradients(self, parameter)
        self.is_stale = not self.syncs
        if self.syncs and not self.has_batch and self.find_unused_parameters:
            _require_zero(self, parameter)
            if not self.arrived:
                self.unused = []  # of the last forward(), which was another step's
        with running():
            base.on_gradient(self, parameter)

    return on_gradient


def _require_own_gradients(engine: Any, parameter: Tensor) -> None:
    """Refuse code that would use or change a gradient before it is averaged."""
    gradient = parameter.grad
    if gradient is not None and gradient.requires_grad:
        raise RuntimeError(
            "backward(create_graph=True) makes gradients that can't be averaged in "
            "place: for a gradient penalty, first call torch.autograd.grad(..., "
            "create_graph=True), and then backward() without create_graph"
        )
    if engine.versions:
        _require_kept(engine, next(reversed(engine.versions)))
    engine.versions[parameter] = parameter._version


def _require_kept(engine: Any, *parameters: Tensor) -> None:
    for parameter in parameters:
        if parameter.grad is None or parameter._version != engine.versions[parameter]:
            raise RuntimeError(
                f"{engine.name_of(parameter)} was updated during backward() by an "
                "optimizer that steps in a hook, but gradients aren't averaged until "
                "backward() returns: call optimizer.step() after it"
            )


def _require_zero(engine: Any, parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.any():
        raise RuntimeError(
            f"{engine.name_of(parameter)} has a gradient that is not zero, but no "
            "forward() of the DistributedDataParallel has run in this step: call the "
            "wrapper instead of its module, and zero_grad() before each step"
        )


def _end_of_backward(base: Any) -> Any:
    def end_of_backward(self: Any) -> None:
        had_gradients = bool(self.arrived)
        if had_gradients:
            _require_kept(self, *self.versions)
            self.versions.clear()
            self.seen.require_trainable(self.arrived, self.find_unused_parameters)
            if self.broadcast_buffers:
                self.seen.buffers(self.module)
        with running():
            base.end_of_backward(self)
        if had_gradients:
            self.has_batch = False

    return end_of_backward


def _all_reduce_usage(base: Any) -> Any:
    def all_reduce_usage(self: Any, has_batch: bool) -> tuple[Tensor, Work]:
        usage: tuple[Tensor, Work] = base.all_reduce_usage(
            self, has_batch and self.has_batch
        )
        return usage

    return all_reduce_usage


def _finalize_backward(base: Any) -> Any:
    def finalize_backward(self: Any) -> None:
        if self.broadcast_buffers and self.pending:
            set_aside_buffers(self.module)
        self.pending.clear()
        base.finalize_backward(self)
        if self.num_synced % EVERY == 0:
            require_equal_weights(self.comm, self.module)
        self.num_synced += 1

    return finalize_backward


def _shared_buffers(base: Any) -> Any:
    def shared_buffers(self: Any) -> Iterator[Tensor]:
        return contiguous(
            self.seen.buffers(self.module) if self.broadcast_buffers else ()
        )

    return shared_buffers


_ADDED = {
    "__init__": _init,
    "on_gradient": _on_gradient,
    "end_of_backward": _end_of_backward,
    "all_reduce_usage": _all_reduce_usage,
    "finalize_backward": _finalize_backward,
    "shared_buffers": _shared_buffers,
}


def _await_backward(self: Any, outputs: Any) -> None:
    """Note that these outputs need today's buffers until their backward() begins."""
    self.num_forwards += 1
    number = self.num_forwards
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            self.pending.add(number)
            tensor.register_hook(functools.partial(_begun, self.pending, number))


def _begun(pending: set[int], number: int, _: Tensor) -> None:
    pending.discard(number)


def _sync_gradients(self: Any) -> None:
    """Synchronize once outside of backward(), in the steps of the unit's join()."""
    is_stale = self.is_stale and any(p.grad is not None for p in self.trainable)
    if self.find_unused_parameters:
        self.unused = []
        usage, work = self.usage_work = self.all_reduce_usage(has_batch=is_stale)
        work.wait()
        if not usage[: self.comm.world_size].any():
            self.usage_work = None
            return
    elif not is_stale:
        return
    for parameter in reversed(self.trainable):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self.mark_ready(parameter)
    self.finalize_backward()
    self.is_stale = self.has_batch = False
