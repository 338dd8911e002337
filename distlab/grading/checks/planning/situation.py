"""The words in which a verdict says which question was answered wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from distlab.given.planning import Cluster, Layout, Model
from distlab.grading.checks.planning import forms
from distlab.grading.checks.planning.questions import MODELS, Call
from distlab.grading.kit.apart import said
from distlab.terminal import enumerated

_MOST = 3  # settings of a layout in a headline


def situation(
    call: Call, name: str, wrong: Sequence[Call], asked: Sequence[Call]
) -> str:
    """The question without what does not matter: "for 2 ranks and 1e+06 bytes".

    A setting matters if all wrong answers have it, so the others are not named.
    """
    if call.function in _BY_FUNCTION:
        return _BY_FUNCTION[call.function](call.arguments, name)
    if call.function == "useful_degrees" and name == "pipeline":
        return f"for {call.arguments[3]} microbatches and bubble = {call.arguments[4]}"
    words = f"for {_model(call)}"
    if any(isinstance(one, int) for one in call.arguments) and _several_stages(call):
        words = f"for stage {call.arguments[-1]} of {_model(call)}"
    if layout := _layout(call, wrong):
        words += f" under {layout}"
    rest: list[str] = []
    if call.function == "mfu":
        rest.append(f"{call.arguments[3]} GPUs")
    if call.function == "model_size" and name == "attention_flops":
        rest.append(f"sequences of {call.arguments[1]:,} tokens")
    if call.function == "layer_activation_bytes":
        rest.append(f"recompute={call.arguments[-1]!r}")
    parts = enumerated([words, *rest])
    return parts + _nodes(call, wrong, asked)


def _several_stages(call: Call) -> bool:
    return any(isinstance(a, Layout) and a.pipeline > 1 for a in call.arguments)


def _of(call: Call, kind: type) -> Any:
    return next((each for each in call.arguments if isinstance(each, kind)), None)


def _model(call: Call) -> str:
    model: Model = call.arguments[0]
    known = next((name for name, one in MODELS.items() if one == model), "")
    layers = f"{model.layers} layer{'s' * (model.layers != 1)}"
    return known.removesuffix(" with h = 256") or f"a model of {layers}"


def _layout(call: Call, wrong: Sequence[Call]) -> str:
    """The settings that aren't the default wherever the answer is wrong."""
    layout = _of(call, Layout)
    if layout is None:
        return ""
    others = [_of(one, Layout) for one in wrong]
    unusual = [f for f in fields(Layout) if getattr(layout, f.name) != f.default]
    common = [
        field
        for field in unusual
        if all(getattr(other, field.name) != field.default for other in others)
    ]
    shown = [f"{f.name}={getattr(layout, f.name)!r}" for f in common[:_MOST]]
    if not shown:
        return ""
    more = ", …" * (len(unusual) > len(shown))
    return f"Layout({', '.join(shown)}{more})"


def _nodes(call: Call, wrong: Sequence[Call], asked: Sequence[Call]) -> str:
    """The size of the nodes, if the answer is wrong for some sizes only."""
    cluster = _of(call, Cluster)
    if cluster is None:
        return ""
    sizes = {_of(one, Cluster).gpus_per_node for one in wrong}
    if sizes == {_of(one, Cluster).gpus_per_node for one in asked}:
        return ""
    return f" on nodes of {_gpus(cluster.gpus_per_node)}"


def _gpus(count: int) -> str:
    return f"{count:,} GPU{'s' * (count != 1)}"


def _ranks(count: int) -> str:
    return f"{count:,} rank{'s' * (count != 1)}"


def _spares(count: int) -> str:
    return f"{count} spare node{'s' * (count != 1)}"


def _roofline(arguments: tuple[Any, ...], name: str) -> str:
    flops, moved, _ = arguments
    return f"for {flops:g} FLOP and {moved:g} bytes"


def _ring(arguments: tuple[Any, ...], name: str) -> str:
    n, size, _ = arguments
    return f"for {_ranks(n)} and {size:g} bytes"


def _link(arguments: tuple[Any, ...], name: str) -> str:
    cluster, size, stride = arguments
    nodes = f"on nodes of {_gpus(cluster.gpus_per_node)}"
    if size == 1:
        return f"for a single rank {nodes}"
    return f"for {_ranks(size)} with stride {stride} {nodes}"


def _interval(arguments: tuple[Any, ...], name: str) -> str:
    save_s, mtbf_s = arguments
    return f"for saves of {said(save_s)} s and a failure every {said(mtbf_s)} s"


def _no_spare(arguments: tuple[Any, ...], name: str) -> str:
    recovery, mtbf_s = arguments
    return (
        f"with {_spares(recovery.spare_nodes)}, repairs of {said(recovery.repair_s)} s "
        f"and a failure every {said(mtbf_s)} s"
    )


def _goodput(arguments: tuple[Any, ...], name: str) -> str:
    cluster, num_gpus, recovery, _ = arguments
    right = forms.goodput(*arguments)
    if name == "share":
        return (
            f"for save_s / interval_s = {recovery.save_s / right.interval_s:.3g} and "
            f"lost_s / mtbf_s = {right.lost_s / right.mtbf_s:.3g}"
        )
    if name in ("price", "wall_s"):
        return (
            f"for {_gpus(num_gpus)}, {_spares(recovery.spare_nodes)} and share = "
            f"{right.share:.3g}"
        )
    if name == "lost_s":
        return (
            f"with {_spares(recovery.spare_nodes)} and repairs of "
            f"{said(recovery.repair_s)} s"
        )
    return f"for {_gpus(num_gpus)} with gpu_mtbf_s={said(cluster.gpu_mtbf_s)}"


_BY_FUNCTION = {
    "roofline_s": _roofline,
    "ring_s": _ring,
    "group_link": _link,
    "checkpoint_interval_s": _interval,
    "no_spare_probability": _no_spare,
    "goodput": _goodput,
}
