"""One of torch's own DistributedDataParallel tests, on distlab's or on torch's wrapper.

torch ships the tests of `test_distributed_spawn` in its wheel. They are written against
torch.nn.parallel.DistributedDataParallel, so this module puts our wrapper, with torch's
signature, in its place before the test begins. Its ranks are spawned and import this
module again, which is why the exchange happens at import.

    DISTLAB_SUITE=ours|torch BACKEND=gloo WORLD_SIZE=3 TEMP_DIR=… \
        python tests/corpora/torch_suite_case.py test_ddp_… | --list

Prints one JSON object: the outcome (passed, skipped, refused or failed) and its text.
An error that this module or distlab raises on purpose counts as refused.
"""

from __future__ import annotations

import json
import os
import re
import sys
import unittest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import instantiate_parametrized_tests
from torch.testing._internal.distributed import distributed_test as suite

from distlab.comm import TorchComm
from distlab.distributed import DistributedDataParallel

TORCHS = torch.nn.parallel.DistributedDataParallel


class NotOfferedError(Exception):
    """The test asks for a part of torch's wrapper that ours doesn't have."""


class Ours(DistributedDataParallel):
    """Our wrapper behind torch's signature, on one of torch's process groups."""

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: Any = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        **others: Any,
    ) -> None:
        asked = {name: value for name, value in others.items() if value}
        if not init_sync:
            asked["init_sync"] = init_sync
        if isinstance(bucket_cap_mb, list):
            asked["bucket_cap_mb"] = bucket_cap_mb
        for name in ("_ddp_params_and_buffers_to_ignore",):
            if getattr(module, name, None):
                asked[name] = getattr(module, name)
        if asked:
            raise NotOfferedError(", ".join(f"{k}={v!r}" for k, v in asked.items()))
        group = process_group or dist.group.WORLD
        super().__init__(
            module,
            TorchComm(group),
            bucket_size_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
        )

    def join(self, *arguments: Any, **named: Any) -> NoReturn:
        raise NotOfferedError("join() as a context manager")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if hasattr(TORCHS, name) or name in ("logger", "reducer", "process_group"):
                raise NotOfferedError(name) from None
            raise


if os.environ["DISTLAB_SUITE"] == "ours":
    for module in (torch.nn.parallel, suite):
        setattr(module, TORCHS.__name__, Ours)


class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """The tests of torch's suite, each on ranks of its own."""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[no-untyped-call]
        self._spawn_processes()


instantiate_parametrized_tests(Case)


def is_refusal(text: str) -> bool:
    """Whether the error was raised on purpose: by this module, or in distlab."""
    frames = re.findall(r'File "([^"]+)", line \d+, in \w+\n +(\w*)', text)
    path, first_word = frames[-1] if frames else ("", "")
    return first_word == "raise" and (path == __file__ or "/distlab/" in path)


def names() -> list[str]:
    """All tests of the suite, parametrized ones under each of their names."""
    return list(unittest.TestLoader().getTestCaseNames(Case))


def main(name: str) -> int:
    """Run one test, and print how it ended."""
    if name == "--list":
        print(json.dumps(names()))
        return 0
    result = unittest.TestResult()
    Case(name).run(result)  # type: ignore[no-untyped-call]
    text = "\n".join(text for _, text in [*result.errors, *result.failures])
    if result.skipped:
        outcome, text = "skipped", result.skipped[0][1]
    elif not text:
        outcome = "passed"
    else:
        outcome = "refused" if is_refusal(text) else "failed"
    print(json.dumps({"outcome": outcome, "text": text}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
