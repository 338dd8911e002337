"""For 2.6: where a rank's gradient is inf, the mean over the ranks is inf as well."""

from __future__ import annotations

from typing import Any

import torch

from distlab.grading.kit.values import brief
from distlab.grading.verdict import NotYetError


def finite(ups: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The same with zeros where a rank's gradient is inf: there the mean is, too.

    Raises:
        NotYetError: the mean is finite there, or nan.
    """
    shown = [{**up, "own": {**up["own"]}, "up": {**up["up"]}} for up in ups]
    for name, own in ups[0]["own"].items():
        if own is None:
            continue
        mean = torch.stack([up["own"][name] for up in ups]).mean(0)
        odd = mean.isinf()
        for rank, up in enumerate(shown):
            found = up["up"][name]
            if found.shape == odd.shape and not torch.equal(found[odd], mean[odd]):
                raise NotYetError(
                    f"in step {step + 1}, where the gradient of `{name}` has an inf on "
                    f"rank 0, the master's gradient on rank {rank} has "
                    f"{brief(found[odd], 3)}, expected {brief(mean[odd])}",
                )
            up["own"][name] = up["own"][name].masked_fill(odd, 0.0)
            if found.shape == odd.shape:
                up["up"][name] = found.masked_fill(odd, 0.0)
    return shown
