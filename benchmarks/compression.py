"""Gradient compression: bytes of each hook, accuracy with and without error feedback.

A convnet of 80,202 parameters is trained in the reference's DistributedDataParallel, on
real processes; shares are of the bytes that the dense all_reduce sends.

    bytes_fp16, bf16, int8, sign1   share of dense, the largest of 2 and 4 ranks
    bytes_topk1         the same over n, for its share grows with n
    bytes_powersgd4     share of dense, equal to the formula r·(rows + columns)
    acc_dense           percent of held-out images, 2 ranks, without compression
    acc_delta_…         percentage points below it; with error feedback, barred
    acc_delta_…_without the same without error feedback: shown
    powersgd_max_difference   gradients, to those of torch's own hook in float64, from
                        the same first Q

The images are Fashion-MNIST, 2 epochs, where `distlab ddp --dataset fashion-mnist
--download` has put it. Otherwise they are 1,797 handwritten digits in 30 epochs
(as many steps as 2 epochs of 21,500 images): one of the 360 held-out images is then
0.28 percentage points. The result says which.

    distlab bench compression [--json]
"""

from __future__ import annotations

import math
import sys

from benchmarks import _compression_ranks as ranks
from benchmarks._bars import Bench, Line
from benchmarks._ratios import on_ranks
from distlab.runner import Cluster, Limits
from distlab.training.ddp_data import locate

WORLDS = (2, 4)
FASHION, DIGITS = ("fashion-mnist", 2), ("digits", 30)  # and epochs
CLOSE = 1e-9  # of a share to its formula
COMPRESSED = ("fp16", "bf16", "int8", "sign1", "topk1", "powersgd4")
WITHOUT = tuple(f"{name}_without" for name in COMPRESSED[2:])
LIMITS = Limits(seconds=3000.0, memory_bytes=8 << 30)
Sent = dict[int, dict[str, float]]
"""By world size and name of a hook: bytes that the rank sends that sends most."""


def powersgd_share() -> float:
    """By the formula: P and Q of every matrix, and all other elements."""
    sent = total = 0
    for shape in ranks.shapes():
        size = math.prod(shape)
        total += size
        if len(shape) > 1:
            columns = size // shape[0]
            sent += min(ranks.FACTORS, shape[0], columns) * (shape[0] + columns)
        else:
            sent += size
    return sent / total


LEAST = {"fp16": 0.5, "bf16": 0.5, "int8": 0.25, "sign1": 0.031, "topk1": 0.0}
MOST = {"fp16": 0.5, "bf16": 0.5, "int8": 0.26, "sign1": 0.033, "topk1": 0.0101}
LEAST["powersgd4"] = powersgd_share() * (1 - CLOSE)
MOST["powersgd4"] = powersgd_share() * (1 + CLOSE)
BENCH = Bench(
    "compression",
    __doc__,
    at_least={f"bytes_{name}": share for name, share in LEAST.items()},
    at_most={f"bytes_{name}": share for name, share in MOST.items()}
    | {f"acc_delta_{name}": 0.5 for name in COMPRESSED}
    | {"powersgd_max_difference": 1e-5},
)


def bytes_results(sent: Sent) -> list[Line]:
    """The share of dense bytes that each hook sends, at each number of ranks.

    That of top-k is by the number of ranks: each sends what all have chosen.
    """
    lines = []
    for name in COMPRESSED:
        over = {n: n if name == "topk1" else 1 for n in sent}
        shares = {n: own[name] / own["dense"] / over[n] for n, own in sent.items()}
        lines.append(
            BENCH.line(
                f"bytes_{name}",
                max(shares.values()),
                "of dense / n" if name == "topk1" else "of dense",
                lower=min(shares.values()),
                shares={f"n{n}": share for n, share in shares.items()},
                bytes_per_step={
                    f"n{n}": own[name] / ranks.BYTE_STEPS for n, own in sent.items()
                },
            )
        )
    return lines


def accuracy_results(found: dict[str, float], data: tuple[str, int]) -> list[Line]:
    """Points below the dense training, from percent by name of the hook."""
    told = {"note": data[0], "epochs": data[1], "ranks": 2}
    dense = found["dense"]
    return [
        BENCH.line("acc_dense", dense, "percent", **told),
        *(
            BENCH.line(
                f"acc_delta_{hook}",
                round(dense - percent, 6),
                "points",
                percent=percent,
                **told,
            )
            for hook, percent in found.items()
            if hook != "dense"
        ),
    ]


def sent_bytes(cluster: Cluster, side: str) -> Sent:
    """By the byte meter, on real processes."""
    sent: Sent = {}
    for n in WORLDS:
        names = ["dense", *COMPRESSED]
        values = on_ranks(cluster, ranks.sent_bytes, n, side, names, limits=LIMITS)
        sent[n] = {name: max(own[name] for own in values) for name in values[0]}
    return sent


def data_files() -> tuple[dict[str, str], tuple[str, int]]:
    """The files of Fashion-MNIST, or none for the digits; and the data's name."""
    try:
        files = locate("fashion-mnist").files or {}
    except (ValueError, OSError):
        return {}, DIGITS
    return {name: str(path) for name, path in files.items()}, FASHION


def accuracies(cluster: Cluster, side: str) -> list[Line]:
    """A training on two ranks with each hook, from the same weights."""
    files, data = data_files()
    found = {}
    for name in ("dense", *COMPRESSED, *WITHOUT):
        how = side, name, files, data[1]
        found[name] = min(on_ranks(cluster, ranks.accuracy, 2, *how, limits=LIMITS))
    return accuracy_results(found, data)


def beside_torchs(cluster: Cluster, side: str) -> Line:
    """PowerSGD on two ranks: the largest difference of a gradient in any step."""
    gaps = on_ranks(cluster, ranks.beside_torchs, 2, side, limits=LIMITS)
    return powersgd_result([gap for own in gaps for gap in own])


def powersgd_result(gaps: list[float]) -> Line:
    """The largest of the differences."""
    peer = "torch powerSGD_hook"
    return BENCH.line("powersgd_max_difference", max(gaps), "", peer=peer)


def measure(code: str) -> list[Line]:
    """All figures of this code: mine, reference or a file."""
    with Cluster(preload=("torch._dynamo", ranks.__name__)) as cluster:
        return [
            *bytes_results(sent_bytes(cluster, code)),
            beside_torchs(cluster, code),
            *accuracies(cluster, code),
        ]


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, code="reference"))
