"""Check that all ranks of a DistributedDataParallel still have the same weights.

Averaged gradients keep equal weights equal, but they don't make different ones equal.
If one rank loads a checkpoint or steps a scheduler alone, the ranks train different
models from then on, each on gradients that fit none of them.

The check reads all weights twice, for a norm and a sum of each parameter, and compares
a digest of 8 bytes. Only if the digests differ do the ranks compare the numbers
themselves, with a tolerance: different processors round differently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.distributed.agreement import DisagreementError, differing

EVERY = 100
"""A DistributedDataParallel checks the first step and then one in this many."""
TOLERANCE = 1e-3


def require_equal_weights(comm: Comm, module: nn.Module) -> None:
    """Require that `module` has nearly the same parameters on all ranks; collective.

    Raises:
        DisagreementError: on every rank if a parameter differs by more than about a
            thousandth of its norm. It names the parameter and the ranks.
    """
    if comm.world_size == 1:
        return
    names, parameters = [], []
    for name, parameter in module.named_parameters():
        if parameter.numel():
            names.append(name)
            parameters.append(parameter)
    own = _summary(parameters)
    digest = hashlib.sha256(own.numpy().tobytes()).hexdigest()
    told = differing(comm, digest, json.dumps(own.tolist()))
    if told is None:
        return
    rows = torch.tensor([json.loads(note) for _, note in told], dtype=torch.double)
    limits = {"rtol": TOLERANCE, "atol": TOLERANCE, "equal_nan": True}
    same = torch.isclose(rows, rows[0], **limits).all(-1)  # type: ignore[arg-type]
    if same.all():
        return
    first = int(same.all(0).int().argmin())
    others = [str(rank) for rank, is_same in enumerate(same[:, first]) if not is_same]
    number = int((~same.all(0)).sum())
    more = f" (and {number - 1} other parameters)" if number > 1 else ""
    plural = "s" if len(others) > 1 else ""
    raise DisagreementError(
        f"{names[first]}{more} has other values on rank{plural} {', '.join(others)} "
        "than on rank 0, so the ranks no longer train the same model: change weights "
        "and learning rates on all ranks alike, or wrap the model after the change, "
        "because wrapping gives every rank the weights of rank 0"
    )


def _summary(parameters: Sequence[Tensor]) -> Tensor:
    """Return each parameter's norm, as a logarithm, and its sum divided by the norm.

    The shape is (parameters, 2), the dtype float64, the device the CPU.
    """
    found = []
    with torch.no_grad():
        for parameter in parameters:
            values = parameter.detach()
            if values.is_complex():
                values = torch.view_as_real(values.resolve_conj())
            if not values.is_floating_point():
                values = values.double()
            elif values.element_size() == 1:  # float8, for which torch has no sums
                values = values.float()
            wide = torch.promote_types(values.dtype, torch.float32)
            found.append(torch.linalg.vector_norm(values, dtype=wide).double())
            found.append(values.sum(dtype=wide).double())
        pairs = torch.stack(found).cpu().view(-1, 2)
    norms = pairs[:, 0]
    scales = torch.where((norms > 0) & norms.isfinite(), norms, 1.0)
    return torch.stack([norms.log1p(), pairs[:, 1] / scales], 1)
