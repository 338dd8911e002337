"""Downloads: whole and right, or one sentence and no file. The mirrors are ours."""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from distlab.data.download import DownloadError, download
from distlab.data.idx_sets import NAMES, find_files, read_images
from tests.workbench.golden import Golden
from tests.workbench.images import contents, known_set

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


class Mirror:
    """A server on loopback; `answer` decides how it behaves."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: Answer = whole
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                name = self.path.rpartition("/")[2].removesuffix(".gz")
                mirror.answer(self, gzip.compress(contents()[name]))

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}/data"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def send(handler: BaseHTTPRequestHandler, body: bytes, length: int) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(length))
    handler.end_headers()
    handler.wfile.write(body)


def whole(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    send(handler, body, len(body))


def cut(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    send(handler, body[:-100], len(body))


def short(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    send(handler, body[:-100], len(body) - 100)


def another(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    other = bytearray(gzip.decompress(body))
    other[-1] ^= 1
    packed = gzip.compress(bytes(other))
    send(handler, packed, len(packed))


def a_page(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    page = b"<html>please log in</html>"
    send(handler, page, len(page))


def gone(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_error(404)


def silent(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.connection.close()


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.delenv("DISTLAB_MIRROR", raising=False)
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    server = Mirror()
    yield server
    server.close()


def test_four_files_come_and_are_not_fetched_again(
    mirror: Mirror, tmp_path: Path
) -> None:
    said: list[str] = []
    known, folder = known_set(mirror.address + "/"), tmp_path / "deep" / "folder"
    download(known, folder, say=said.append)
    assert mirror.asked == [f"/data/{name}.gz" for name in NAMES]
    assert len(said) == 4
    assert "127.0.0.1" in said[0]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}.gz" for name in NAMES
    )
    assert len(read_images(find_files(folder), known).train_targets) == 96
    download(known, folder, say=said.append)
    assert len(said) == 4

    damaged = folder / f"{NAMES[2]}.gz"
    damaged.write_bytes(damaged.read_bytes()[:50])
    download(known, folder, say=said.append)
    assert mirror.asked[4:] == [f"/data/{NAMES[2]}.gz"]
    read_images(find_files(folder), known)


def test_a_bad_answer_leaves_no_file(
    mirror: Mirror, tmp_path: Path, golden: Golden
) -> None:
    size = len(gzip.compress(contents()[NAMES[0]]))
    told = []
    for answer, why in (
        (cut, rf"\b{size - 100:,} \w+ {size:,}\b"),
        (short, r"127\.0"),
        (another, r"\bSHA-256\b.*\b\w{12}…"),
        (a_page, r"\bIDX\b.*\b3c 68"),
        (gone, r"\b404\b"),
        (silent, r"127\.0"),
    ):
        mirror.answer = answer
        with pytest.raises(DownloadError, match=why) as caught:
            download(known_set(mirror.address), tmp_path / "new", say=print)
        sentence = str(caught.value)
        assert f"{NAMES[0]}.gz" in sentence
        assert "127.0.0.1" in sentence
        assert "--data-dir" in sentence
        assert "\n" not in sentence
        assert list(tmp_path.iterdir()) == []  # an empty one would look like a data set
        told.append(re.sub(r"[\d,]+ of [\d,]+", "<got> of <promised>", sentence))
    golden("data/download-refused", "\n".join(told))


def test_the_next_mirror_is_asked(mirror: Mirror, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"  # the port of `discard`, where nothing listens
    said: list[str] = []
    known = known_set(nobody, mirror.address)
    download(known, tmp_path, say=said.append)
    assert len(said) == 8
    read_images(find_files(tmp_path), known)


def test_offline(tmp_path: Path, mirror: Mirror) -> None:
    known = known_set("http://127.0.0.1:9", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1:9\b.*127\.0\.0\.1:9\b"):
        download(known, tmp_path, say=print)


def test_no_other_kind_of_address(tmp_path: Path, mirror: Mirror) -> None:
    with pytest.raises(DownloadError, match=r"http://.*https://"):
        download(known_set(f"file://{tmp_path}"), tmp_path / "new", say=print)


def test_a_mirror_of_ones_own(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTLAB_MIRROR", mirror.address)
    download(known_set("http://127.0.0.1:9"), tmp_path, say=print)
    assert len(mirror.asked) == 4
