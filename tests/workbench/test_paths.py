"""Whose code a file has: the user's, or a library's or distlab's."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from distlab import paths


def test_whose_code_a_file_has(tmp_path: Path) -> None:
    solution = Path(__file__).parents[2] / "solutions" / "collectives.py"
    own = ["program.py", str(tmp_path / "train.py"), str(tmp_path), str(solution)]
    theirs = ["<frozen runpy>", os.__file__, torch.nn.__file__, paths.__file__]
    theirs.append("/elsewhere/lib/python3/site-packages/package/module.py")
    told = [paths.is_users_code(file) for file in (*own, *theirs)]
    assert told == [True] * len(own) + [False] * len(theirs)
