"""Phase 2's tensor and pipeline parallelism as wrappers of an ordinary module.

TensorParallel      every rank has 1/n of each large layer, and sees the same samples
PipelineParallel    every rank has 1/n of the layers, which microbatches pass through
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.distributed import registry
from distlab.distributed.agreement import agreed, describe, require_alike, require_close
from distlab.distributed.group import default_comm
from distlab.distributed.norms import clip, refuse_torchs_clip
from distlab.distributed.parts import running, unit
from distlab.distributed.random_numbers import Stream, shared
from distlab.distributed.weights import EVERY
from distlab.given.pipeline_parallel import Action, ModelChunk

LossFn = Callable[[Tensor, Tensor], Tensor]
Schedule = Literal["1f1b", "gpipe", "interleaved"]


class TensorParallel(nn.Module):
    """Shard a module's large linear layers over the ranks, in place; collective.

    First, all ranks take rank 0's weights. If you call the module with the same inputs
    on every rank, every rank returns the same outputs. We shard

    - each MLP, that is a module with the layers `up` and `down`,
    - each attention, that is a module with `qkv`, `proj` and `num_heads`, and
    - the linear layers that `plan` names, as "column" (the outputs stay sharded) or as
      "row" (it takes such outputs as inputs).

    All other layers stay complete on every rank.

    In forward(), every rank draws rank 0's random numbers, so that dropout is the same
    on all of them. Between a column and a row layer, however, each rank draws its own
    numbers. To clip gradients, use clip_grad_norm_() of this class. torch's function
    sees only the shards of one rank, so it would scale the other layers differently on
    each rank. We therefore make it raise an error.

    Raises:
        ValueError: on every rank if the models differ between ranks, there is nothing
            to shard, n doesn't divide a layer, or a layer to shard shares its weight
            with another or is parametrized. In that case, nothing has changed. In
            forward(), if the inputs differ between ranks in shape, or (checked in the
            first and every 100th call) in their values, or if a layer needs all
            features when each rank has only a part of them.

    Example:
        init_process_group()
        layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
        model = TensorParallel(
            torch.nn.Sequential(*layers), plan={"0": "column", "2": "row"}
        )
        assert model(torch.ones(3, 8)).shape == (3, 2)
        assert model.module[0].weight.shape == (16 / get_world_size(), 8)
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        *,
        plan: Mapping[str, Literal["column", "row"]] | None = None,
    ) -> None:
        super().__init__()
        self.comm = comm = comm or default_comm()
        self.stream = Stream(comm)
        self.num_calls = 0
        attentions = [part for part in module.modules() if _is_attention(part)]
        mlps = [part for part in module.modules() if _is_mlp(part)]
        named: dict[str, Any] = {}

        def described() -> str:
            named.update(_named(module, plan or {}))
            _check(comm.world_size, attentions, mlps, named, plan or {})
            refuse_shared(module, [*_layers(attentions, mlps), *named.values()])
            return f"{describe(module)}\nplan={dict(plan or {})}"

        agreed(comm, described, "give every rank the same model and plan")
        tensor_parallel = unit("tensor_parallel")
        before, after = tensor_parallel.FULL
        with running():
            unit("trainer").broadcast_model(comm, module)
            for part in attentions:
                tensor_parallel.parallel_attention(comm, part)
            for part in mlps:
                tensor_parallel.parallel_mlp(comm, part)
            for name, kind in (plan or {}).items():
                make, operator = tensor_parallel.ColumnParallelLinear, before
                if kind == "row":
                    make, operator = tensor_parallel.RowParallelLinear, after
                module.set_submodule(name, make(comm, named[name], operator))
        self.module = module
        columns = [layer for layer in module.modules() if _is_column(layer)]
        rows = [layer for layer in module.modules() if _is_row(layer)]
        if comm.world_size > 1 and rows:
            self.stream.surround(columns, rows)
            self._watch_parts(columns)
        if comm.world_size > 1:
            refuse_torchs_clip(self.parameters(), "TensorParallel")
        registry.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        """Copy the wrapper and its layers on this comm, without sending anything."""
        return _copied(self, memo)

    def _watch_parts(self, columns: Sequence[nn.Module]) -> None:
        """Refuse what can't be computed from a column layer's part of the outputs."""
        part: list[torch.Size] = []

        def note(_module: nn.Module, _inputs: Any, outputs: Tensor) -> None:
            part[:] = [outputs.shape]

        def require_whole(layer: nn.Module, inputs: Any) -> None:
            if not (self.stream.has_begun and inputs and part):
                return
            if isinstance(inputs[0], Tensor) and inputs[0].shape == part[0]:
                raise ValueError(
                    f"a {type(layer).__name__} between a column and a row layer would "
                    "see or train on this rank's part of the features only: leave the "
                    "two layers whole"
                )

        for layer in columns:
            layer.register_forward_hook(note)
        for layer in self.module.modules():
            if isinstance(layer, _OVER_FEATURES) or (
                not (_is_column(layer) or _is_row(layer))
                and any(p.requires_grad for p in layer.parameters(recurse=False))
            ):
                layer.register_forward_pre_hook(require_whole)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs of the module, which are the same on every rank.

        Raises:
            ValueError: the inputs differ between ranks in shape or, in the first and
                then every 100th call, in value.
        """
        compare = require_alike if self.num_calls % EVERY else require_close
        compare(self.comm, (inputs, named), "TensorParallel")
        self.num_calls += 1
        self.stream.forget()
        with shared(self.comm), running():
            outputs = self.module(*inputs, **named)
            self.stream.end()
        return outputs

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients to `max_norm` if the full gradient is longer; collective.

        Returns the norm that the full gradient had before scaling, on every rank.

        Example:
            init_process_group()
            layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
            model = TensorParallel(
                torch.nn.Sequential(*layers), plan={"0": "column", "2": "row"}
            )
            model(torch.ones(3, 8)).sum().backward()
            assert model.clip_grad_norm_(0.1) > 0.1
            assert model.clip_grad_norm_(0.1) < 0.1001
        """
        sharded = [
            parameter
            for layer in self.module.modules()
            for parameter in _sharded_parameters(layer)
        ]
        known = set(sharded)
        full = [p for p in self.module.parameters() if p not in known]
        return clip(self.comm, max_norm, sharded, full)


class PipelineParallel(nn.Module):
    """Split layers into one stage per rank, and pass batches through in microbatches.

    Collective: every rank constructs it with the same layers, and they get rank 0's
    weights. After that, this module has only the layers of this rank's stages, so an
    optimizer of its parameters() does this rank's part of a step. `example` is one
    sample as it enters the first layer; only its shape and dtype matter. `loss_fn` must
    be a mean over samples. `costs` are the costs of the layers, by default their
    numbers of parameters, and we split in such a way that the most expensive stage is
    as cheap as possible. With num_chunks > 1 the schedule is "interleaved". NCCL isn't
    supported, because its messages have no tags.

    A parameter may belong to several stages, such as an embedding that is also the
    output layer. After each batch, every rank that has it then adds up the gradients of
    all of them. Between two stages, activations have the shape and dtype that `example`
    has there without autocast. Under autocast(), a stage whose output is bfloat16
    therefore sends float32. Each rank draws its own random numbers, even if the seeds
    are equal. To clip gradients, use clip_grad_norm_() of this class, because torch's
    function would see only the stages of one rank. We make it raise an error.

    Raises:
        ValueError: on every rank, if there are fewer layers than stages, `schedule` and
            `num_chunks` don't fit together, or layers or arguments differ between
            ranks.

    Example:
        init_process_group()
        layers = [torch.nn.Linear(4, 4) for _ in range(4)]
        mse = torch.nn.functional.mse_loss
        model = PipelineParallel(layers, torch.zeros(4), mse, num_microbatches=4)
        loss = model.train_batch(torch.ones(8, 4), torch.zeros(8, 4))
        assert loss > 0
        assert all(p.grad is not None for p in model.parameters())
    """

    def __init__(
        self,
        layers: Sequence[nn.Module] | nn.Sequential,
        example: Tensor,
        loss_fn: LossFn,
        *,
        num_microbatches: int,
        schedule: Schedule | None = None,
        num_chunks: int = 1,
        costs: Sequence[float] | None = None,
        comm: Comm | None = None,
    ) -> None:
        super().__init__()
        self.comm = comm or default_comm()
        self.loss_fn, self.num_microbatches = loss_fn, num_microbatches
        name = schedule or ("1f1b" if num_chunks == 1 else "interleaved")
        n, rank = self.comm.world_size, self.comm.rank
        model = nn.Sequential(*layers)
        if costs is None:
            costs = [
                float(sum(p.numel() for p in layer.parameters())) for layer in model
            ]
        plan: tuple[list[Action], list[list[int]]] = ([], [])

        def described() -> str:
            nonlocal plan
            if (reduction := getattr(loss_fn, "reduction", "mean")) != "mean":
                raise ValueError(
                    "the loss of a batch is the mean over its microbatches, so loss_fn "
                    f"must be a mean over samples, not reduction={reduction!r}"
                )
            actions = _actions(name, rank, n, num_microbatches, num_chunks)
            with running(ValueError):
                stages = unit("model_parallel").partition(costs, n * num_chunks)
            plan = actions, [list(stage) for stage in stages]
            kind = f"{tuple(example.shape)} {example.dtype}"
            return (
                f"{describe(model)}\n{name}, num_microbatches={num_microbatches}, "
                f"num_chunks={num_chunks}\nstages={plan[1]}\nexample: {kind}"
            )

        agreed(self.comm, described, "give every rank the same layers and arguments")
        self.actions, stages = plan
        with running(ValueError):
            unit("trainer").broadcast_model(self.comm, model)
        samples = _samples(model, example)
        own = stages[rank::n]  # chunk c of rank r is stage c · n + r
        self.__dict__["tied"] = _held_by_several(
            [[model[k] for stage in stages[r::n] for k in stage] for r in range(n)]
        )
        self.stream = Stream(self.comm)
        parts = [nn.Sequential(*(model[k] for k in stage)) for stage in own]
        self.stages = nn.ModuleList(parts)
        following = stages[rank + 1 :: n]  # none after the last stage
        sent = [samples[stage[0]] for stage in following] + [None]
        self.chunks = [
            ModelChunk(_Boundary(part, after), samples[stage[0]])
            for part, stage, after in zip(parts, own, sent, strict=False)
        ]
        if n > 1:
            refuse_torchs_clip(self.parameters(), "PipelineParallel")
        registry.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineParallel:
        """Copy the wrapper and its stages on this comm, without sending anything."""
        return _copied(self, memo)

    def train_batch(self, inputs: Tensor, targets: Tensor) -> float:
        """Add the batch's gradient to every .grad; return its mean loss on every rank.

        Pass the same batch on every rank. Only the first stage reads the values of
        `inputs`, and only the last one those of `targets`; the others just count the
        samples.

        Raises:
            ValueError: on every rank if there are fewer samples than microbatches, if
                inputs and targets differ in number, if the ranks' batches do, or within
                no_grad(). On a single rank if its stage returns anything but a tensor,
                or samples of another shape than for `example`.
        """
        m = self.num_microbatches

        def described() -> str:
            if not torch.is_grad_enabled():
                raise ValueError(
                    "train_batch() computes gradients, so it can't run within "
                    "no_grad(): call it outside"
                )
            if len(inputs) < m:
                raise ValueError(f"{len(inputs)} samples do not make {m} microbatches")
            if len(targets) != len(inputs):
                raise ValueError(f"{len(inputs)} inputs have {len(targets)} targets")
            return f"{len(inputs)} samples"

        agreed(self.comm, described, "give every rank the same batch")
        pairs = zip(inputs.tensor_split(m), targets.tensor_split(m), strict=True)
        held = [p for p, ranks in self.__dict__["tied"] if self.comm.rank in ranks]
        before = {parameter: parameter.grad for parameter in held}
        for parameter in held:
            parameter.grad = None
        if self.comm.world_size > 1:
            self.stream.forget()
            self.stream.begin()
        with running():
            loss = unit("pipeline_parallel").execute(
                self.comm, self.chunks, self.actions, self.loss_fn, list(pairs)
            )
        self.stream.end()
        for parameter, ranks in self.__dict__["tied"]:
            _add_up(self.comm, parameter, ranks)
        for parameter, gradient in before.items():
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient
        return float(loss)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients to `max_norm` if the full gradient is longer; collective.

        Returns the norm that the gradient of all stages had before scaling, on every
        rank.

        Example:
            init_process_group()
            layers = [torch.nn.Linear(4, 4) for _ in range(4)]
            mse = torch.nn.functional.mse_loss
            model = PipelineParallel(layers, torch.zeros(4), mse, num_microbatches=4)
            model.train_batch(torch.ones(8, 4), torch.full((8, 4), 9.0))
            assert model.clip_grad_norm_(0.1) > 0.1
            assert model.clip_grad_norm_(0.1) < 0.1001
        """
        copies = {p for p, ranks in self.__dict__["tied"] if ranks[0] != self.comm.rank}
        own = [p for p in self.stages.parameters() if p not in copies]
        held = [p for p in self.stages.parameters() if p in copies]
        return clip(self.comm, max_norm, own, copies=held)

    def forward(self, *_: Any) -> Any:
        """Raise an error, because no rank has all layers.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("no rank has the full model: call train_batch()")


class _Boundary(nn.Module):
    """A stage whose outputs have the form that the next stage expects to receive.

    `after` is a sample that enters the next stage, or None after the last one.
    """

    def __init__(self, stage: nn.Module, after: Tensor | None) -> None:
        super().__init__()
        self.stage = stage
        self.kind = None if after is None else (after.shape, after.dtype)

    def forward(self, inputs: Tensor) -> Any:
        """Return the stage's outputs, with a dtype and a graph that suit a message.

        Raises:
            ValueError: the outputs aren't a tensor of the shape that was announced.
        """
        outputs = self.stage(inputs)
        if self.kind is None:
            return outputs
        shape, dtype = self.kind
        if not isinstance(outputs, Tensor) or outputs.shape[1:] != shape:
            found = type(outputs).__name__
            if isinstance(outputs, Tensor):
                found = f"samples of shape {tuple(outputs.shape[1:])}"
            raise ValueError(
                f"a stage returns {found}, but the next one expects samples of shape "
                f"{tuple(shape)}, as for `example`: give an example like the inputs"
            )
        outputs = outputs.to(dtype)
        if not outputs.requires_grad:  # a frozen first stage: nothing lies behind it
            outputs = outputs.detach().requires_grad_()
        return outputs


_OVER_FEATURES = (nn.GLU, nn.LogSoftmax, nn.Softmax, nn.Softmin)
Parallel = TypeVar("Parallel", TensorParallel, PipelineParallel)


def _copied(wrapper: Parallel, memo: dict[int, Any]) -> Parallel:
    memo[id(wrapper.comm)] = wrapper.comm
    twin = memo[id(wrapper)] = type(wrapper).__new__(type(wrapper))
    twin.__dict__.update(copy.deepcopy(wrapper.__dict__, memo))
    if wrapper.comm.world_size > 1:
        refuse_torchs_clip(twin.parameters(), type(wrapper).__name__)
    return twin


Tied = list[tuple[Tensor, list[int]]]


def _held_by_several(layers: Sequence[Sequence[nn.Module]]) -> Tied:
    """Find trained parameters that several ranks have, and list those ranks."""
    ranks: dict[Tensor, list[int]] = {}
    for rank, own in enumerate(layers):
        for parameter in nn.ModuleList(own).parameters():
            ranks.setdefault(parameter, []).append(rank)
    return [(p, held) for p, held in ranks.items() if len(held) > 1 and p.requires_grad]


def _add_up(comm: Comm, parameter: Tensor, ranks: Sequence[int]) -> None:
    """Set .grad on these ranks to the sum of theirs, identical to the last bit."""
    first, *others = ranks
    if comm.rank not in ranks:
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    total = parameter.grad.contiguous()
    if comm.rank == first:
        received = torch.empty_like(total)
        for rank in others:
            comm.recv(received, rank)
            total += received
        for rank in others:
            comm.send(total, rank)
    else:
        comm.send(total, first)
        comm.recv(total, first)
    parameter.grad = total


def _actions(name: str, rank: int, n: int, m: int, num_chunks: int) -> list[Action]:
    plans = unit("pipeline_parallel")
    if name not in ("1f1b", "gpipe", "interleaved"):
        raise ValueError(f"no schedule {name!r}: choose 1f1b, gpipe or interleaved")
    if name != "interleaved" and num_chunks > 1:
        raise ValueError(f"{name} has one model chunk on each rank, not {num_chunks}")
    with running(ValueError):
        if name == "interleaved":
            actions = plans.interleaved(rank, n, m, num_chunks)
        else:
            plan = plans.one_f_one_b if name == "1f1b" else plans.gpipe
            actions = plan(rank, n, m)
    return list(actions)


def _samples(model: nn.Sequential, example: Tensor) -> list[Tensor]:
    """Return one sample that enters each layer."""
    modes = {module: module.training for module in model.modules()}
    model.eval()  # so that nothing is drawn, and no running statistics change
    samples, x = [], example[None]
    with torch.no_grad(), torch.autocast(example.device.type, enabled=False):
        for layer in model:
            samples.append(x[0])
            x = layer(x)
    for module, mode in modes.items():
        module.training = mode
    return samples


def _named(module: nn.Module, plan: Mapping[str, str]) -> dict[str, nn.Module]:
    """Return the layers that the plan names.

    Raises:
        ValueError: the module has no such layer.
    """
    layers = dict(module.named_modules(remove_duplicate=False))
    for name in plan:
        if name not in layers:
            raise ValueError(f"plan: the module has no layer {name}")
    return {name: layers[name] for name in plan}


def _layers(attentions: Sequence[Any], mlps: Sequence[Any]) -> list[nn.Module]:
    """Return the linear layers in these parts, which we will replace with shards."""
    layers: list[nn.Module] = [
        layer for part in attentions for layer in (part.qkv, part.proj)
    ]
    return layers + [layer for part in mlps for layer in (part.up, part.down)]


def refuse_shared(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Refuse layers whose shards would lose something, such as a shared weight.

    Raises:
        ValueError: a layer shares a parameter, or isn't a plain nn.Linear.
    """
    places = dict[int, list[str]]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    whole = {id(part): name for name, part in module.named_modules()}
    for layer in layers:
        name = whole.get(id(layer), "a layer")
        for parameter in layer.parameters(recurse=False):
            if len(places[id(parameter)]) > 1:
                first, second = places[id(parameter)][:2]
                raise ValueError(
                    f"{first} and {second} are the same tensor, but a shard of {name} "
                    "would be a separate one: don't shard the layer, or don't tie it"
                )
        if type(layer).forward is not nn.Linear.forward or list(layer.children()):
            raise ValueError(
                f"{name} computes more than an nn.Linear, for example a "
                "parametrization, and its shards wouldn't: don't shard the layer"
            )


def _is_column(layer: nn.Module) -> bool:
    return isinstance(layer, unit("tensor_parallel").ColumnParallelLinear)


def _is_row(layer: nn.Module) -> bool:
    return isinstance(layer, unit("tensor_parallel").RowParallelLinear)


def _sharded_parameters(layer: nn.Module) -> list[Tensor]:
    """Return the layer's sharded parameters; a row layer's bias isn't one of them."""
    if _is_row(layer):
        return [layer.get_parameter("weight")]
    return list(layer.parameters(recurse=False)) if _is_column(layer) else []


def _are_linear(part: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(part, name, None), nn.Linear) for name in names)


def _is_attention(part: nn.Module) -> bool:
    return _are_linear(part, "qkv", "proj") and hasattr(part, "num_heads")


def _is_mlp(part: nn.Module) -> bool:
    return _are_linear(part, "up", "down")


def _check(
    n: int,
    attentions: Sequence[Any],
    mlps: Sequence[Any],
    named: Mapping[str, Any],
    plan: Mapping[str, str],
) -> None:
    """Refuse a plan that can't work, before anything is sent or replaced."""
    if not (attentions or mlps or plan):
        raise ValueError(
            "no MLP (up, down) and no attention (qkv, proj, num_heads) to shard: name "
            "linear layers with plan={'name': 'column' or 'row'}"
        )
    sizes = [(f"{part.num_heads} heads", part.num_heads) for part in attentions]
    sizes += [
        (f"{part.up.out_features} outputs", part.up.out_features) for part in mlps
    ]
    for name, kind in plan.items():
        layer = named[name]
        if not isinstance(layer, nn.Linear) or kind not in ("column", "row"):
            raise ValueError(
                f"plan: {name} is no linear layer, or {kind!r} no sharding"
            )
        size = layer.out_features if kind == "column" else layer.in_features
        sizes.append((f"{name}: {size} features", size))
    for what, size in sizes:
        if size % n:
            raise ValueError(f"{what} do not fit on {n} ranks")
