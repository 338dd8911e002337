"""What one process encodes the other decodes, and nothing else is taken for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from distlab.runner.wire import decode, encode

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def round_trip(value: Any) -> Any:
    line = encode(value)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    return decode(line)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (3,), (2, 3), (0, 4), (1, 1, 1)]:
        sample = torch.arange(math.prod(shape)).add(1).reshape(shape).to(dtype)
        back = round_trip(sample)
        assert (back.dtype, back.shape) == (sample.dtype, sample.shape)
        assert torch.equal(back, sample)


def test_every_bit_of_a_float_travels() -> None:
    bits = [0x7FC00001, -0x80000000, 1, 0x7F800000, -0x800000, 0x3F800001]
    sample = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert torch.equal(round_trip(sample).view(torch.int32), sample.view(torch.int32))


@pytest.mark.parametrize(
    "sample",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(6.0)[::2],
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1.0, 2.0]).expand(2, 2),
    ],
    ids=["transposed", "strided", "with grad", "parameter", "conjugate", "expanded"],
)
def test_tensors_that_are_views_travel_as_their_values(sample: torch.Tensor) -> None:
    back = round_trip(sample)
    assert torch.equal(back, sample.detach())
    assert back.is_contiguous()
    assert not back.requires_grad


def test_what_was_decoded_may_be_written_to() -> None:
    back = round_trip(torch.zeros(3))
    back += 1
    assert back.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(10**30),
        1e-320,
        -0.0,
        math.inf,
        -math.inf,
        "",
        "ä\n\x00 \U0001f600 \ud800",
        [],
        (),
        {},
        [1, (2, [3, (4,)])],
        ((), ((),)),
        {"a": {"b": [None, (1, "x")]}},
        {1: "one", (2, 3): "pair", None: 0, "text": 1},
        {1: "one", "1": "text"},
        {"~tensor": [1, 2]},
        {"~tuple": [1]},
        {"~dict": []},
        {"~": 0, "other": 1},
        {"a": {"~tensor": 1}},
    ],
    ids=repr,
)
def test_plain_values(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert repr(back) == repr(value)  # types and signs too


def test_nan_stays_nan() -> None:
    assert math.isnan(round_trip({"loss": math.nan})["loss"])


def test_tensors_inside_other_values() -> None:
    back = round_trip({"grads": [(0, torch.ones(2)), (1, torch.zeros(0))]})
    assert [number for number, _ in back["grads"]] == [0, 1]
    assert back["grads"][0][1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("value", "name"), [({1}, "set"), ([object()], "object"), ({"x": 1j}, "complex")]
)
def test_other_values_are_refused_by_their_type(value: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        encode(value)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"hello",
        b"{",
        b"\xff\xfe",
        b'{"a": 1} {"b": 2}',
        b'{"~tensor": 5}',
        b'{"~tensor": ["float32", [2]]}',
        b'{"~tensor": ["float32", [2], "AAAA"]}',
        b'{"~tensor": ["float32", [3], "AAAAAA=="]}',
        b'{"~tensor": ["float32", [1], "not base 64!"]}',
        b'{"~tensor": ["nn", [1], "AAAAAA=="]}',
        b'{"~tensor": ["system", [1], "AAAAAA=="]}',
        b'{"~tensor": [3, [1], "AAAAAA=="]}',
        b'{"~tensor": ["float32", -1, ""]}',
        b'{"~tuple": 3}',
        b'{"~dict": [1]}',
        b'{"~dict": [[[], 1]]}',
        b'{"~module": "os"}',
        b'{"~tuple": [], "more": 1}',
        b"[" * 100_000,
    ],
    ids=lambda line: repr(line[:40]),
)
def test_foreign_lines_are_rejected(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(line)
