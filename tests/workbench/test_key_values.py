"""The store's service by itself: what is no request, and what does not fit."""

from __future__ import annotations

import pytest

from distlab.comm.key_values import KeyValues, StoreByCalls
from tests.workbench.golden import Golden

NO_REQUESTS = [
    b"",
    b"\x09",
    b"\1",
    b"\1\0\0\0\2ab",
    b"\2\0\0\0\7ab",
    b"\2\0",
    b"\3\0\0\0\1",
]


def test_what_is_no_request_changes_nothing(golden: Golden) -> None:
    store, heads = KeyValues(), set()
    for message in NO_REQUESTS:
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - the golden file
            store.handle(0, message)
        assert store.stored == {}
        heads.add(str(refused.value).partition(": ")[0])
    (head,) = heads
    golden("store/no request", head)


def test_a_store_that_is_full_says_so_and_keeps_what_it_has() -> None:
    service = KeyValues(max_bytes=10)
    store = StoreByCalls(lambda message, _: service.handle(0, message) or b"")
    store.set("a", b"123456789")
    store.set("a", b"12345678")
    for call in (
        lambda: store.set("a", b"1234567890"),
        lambda: store.set("b", b"1"),
        lambda: store.add("c", 5),
        lambda: store.compare_set("b", b"", b"1"),
    ):
        with pytest.raises(ValueError, match=r"\bfull\b.*\b10\b"):
            call()
    store.set("a", b"")
    assert store.add("b", 5) == 5
