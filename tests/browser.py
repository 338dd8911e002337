"""A headless Chromium that tests can drive: its DevTools protocol, over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
]
# Chromium reads commands from file 3 and answers on file 4.
_LAUNCH = """
import fcntl, os, sys
both = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for file, number in zip(both, (3, 4)):
    os.dup2(file, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
_PATIENCE_S = 60.0


class Browser:
    """One browser with one page in it."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._number = 0
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        self._session = ""
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; events that come meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method}
        message["params"] = params
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], _PATIENCE_S)[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._read, 1 << 20)
            if not more:
                raise EOFError("the browser has ended")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def script(self, source: str) -> Any:
        """What an expression in the page comes to."""
        answer = self.call(
            "Runtime.evaluate", expression=source, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def until(self, source: str) -> Any:
        """Wait until an expression is true."""
        ends = time.monotonic() + _PATIENCE_S
        while not (value := self.script(source)):
            if time.monotonic() > ends:
                raise TimeoutError(f"never true: {source}")
            time.sleep(0.01)
        return value

    def open(self, path: Path, fragment: str = "") -> None:
        """Open one of our pages, and wait until it is drawn."""
        self.go(path.resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        self.until("document.documentElement.dataset.ready === 'yes'")

    def go(self, address: str) -> None:
        """Open any page, anew, and wait until it is loaded."""
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=address)
        self.until(f"location.href !== 'about:blank' && {_LOADED}")

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window, in points."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """One event of the mouse."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        """Press and let go."""
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def key(self, key: str) -> None:
        """Press a key; as a letter if it is one."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def settled(self) -> None:
        """Wait for the drawing that the last events asked for."""
        self.script("new Promise(r => requestAnimationFrame(() => setTimeout(r, 0)))")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Take a picture of the window, or of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def requests(self) -> list[str]:
        """The addresses the page asked for since it was opened, its own left out."""
        asked = [e for e in self.events if e.get("method") == _ASKED]
        return [
            e["params"]["request"]["url"]
            for e in asked
            if e["params"].get("type") != "Document"
        ]

    def complaints(self) -> list[str]:
        """Errors that the page raised or the browser logged."""
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded":
                found.append(str(event["params"]["entry"]["text"]))
        return found


_ASKED = "Network.requestWillBeSent"
_LOADED = "document.readyState === 'complete'"


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, and end it.

    Raises:
        RuntimeError: none is installed.
    """
    if PROGRAM is None:
        raise RuntimeError("no chromium here")
    to_it, ours = os.pipe()
    from_it, its = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        launch = [sys.executable, "-I", "-c", _LAUNCH, str(to_it), str(its)]
        process = subprocess.Popen(
            [*launch, PROGRAM, *_FLAGS, f"--user-data-dir={home}"],
            pass_fds=(to_it, its),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": home},
        )
        os.close(to_it)
        os.close(its)
        try:
            one = Browser(ours, from_it)
            yield one
            one._session = ""
            one.call("Browser.close")
            process.wait(timeout=_PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            os.close(ours)
            os.close(from_it)
