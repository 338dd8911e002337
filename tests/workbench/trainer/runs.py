"""Trains with several sets of flags, one after another, on the ranks that there are.

python -m torch.distributed.run --nproc-per-node 2 runs.py FOLDER CASES.json

CASES has the flags of each case by its name; the records of a case are written into
FOLDER/<its name>, with the loss of each step, and a digest of each sample that a rank
has trained on in samples.<rank>.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.distributed.job import build, use_code
from distlab.distributed.parts import unit
from distlab.given.trainer import Job
from distlab.recipe.options import read_options


def noted(job: Job, folder: Path) -> Job:
    """The job, with a line for each sample that goes through `prepare`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"samples.{job.comm.rank}"
    path.write_text("")

    def prepare(inputs: Tensor, targets: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        with path.open("a") as file:
            for image in inputs:
                digest = hashlib.sha256(image.double().numpy().tobytes()).hexdigest()
                file.write(f"{epoch} {digest}\n")
        return job.prepare(inputs, targets, epoch)

    return replace(job, prepare=prepare)


def main() -> None:
    """Play them all."""
    folder, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    for name, flags in cases.items():
        where = ["--records", str(folder / name), "--log-every", "1"]
        options = read_options([*flags, *where])
        use_code(options.code)
        trainer, own = unit("imagenet_trainer"), folder / name

        def build_noted(*given: Any, own: Path = own) -> Job:
            return noted(build(*given), own)

        trainer.build = build_noted
        trainer.train(options)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
