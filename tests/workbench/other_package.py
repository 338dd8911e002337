"""A package of somebody else's, installed as pip would do it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def install_package(folder: Path, name: str, points: str, **modules: str) -> None:
    """Put a package with these modules and entry points into `folder`/site."""
    package = folder / "site" / name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for module, text in modules.items():
        (package / f"{module}.py").write_text(text)
    metadata = folder / "site" / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)


def run_beside(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder` with what is installed there."""
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(folder / "site"), "COLUMNS": "200"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
