"""What is attached to a script gets its call once the script imports a module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from distlab.attached import after_import


def test_each_hook_is_called_once_per_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "imported_later"
    (tmp_path / f"{name}.py").write_text("loaded = True\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    finders = list(sys.meta_path)
    calls: list[tuple[str, str]] = []

    def hook(who: str, module: ModuleType) -> None:
        calls.append((who, module.__name__))

    stops = [
        after_import(dict.fromkeys((name, "json"), partial(hook, who)))
        for who in ("recorder", "monitor")
    ]
    assert calls == [("recorder", "json"), ("monitor", "json")]  # json was there
    calls.clear()
    assert importlib.util.find_spec(name) is not None  # a look doesn't import it
    assert calls == []
    assert importlib.import_module(name).loaded
    assert sorted(calls) == [("monitor", name), ("recorder", name)]
    for stop in stops:
        stop()
    assert sys.meta_path == finders
