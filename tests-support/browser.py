# SPDX-License-Identifier: Apache-2.0
"""Drives a real headless Chromium through its debugging pipe; no package of its own is needed."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_DEADLINE_S = 60.0


def find_browser() -> str | None:
    """Return the path of a Chromium, None where none is installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One browser with one page.

    Args:
        program: What `find_browser` returns.
        folder: Where the browser may keep its things.
        url: The page.
    """

    def __init__(self, program: str, folder: Path, url: str) -> None:
        self._received = b""
        self._number = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        arguments = [
            program, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--disable-component-update",
            "--window-size=1280,900", f"--user-data-dir={folder}",
        ]  # fmt: skip
        # The browser expects its pipes under the numbers 3 and 4.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *arguments],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            self._open(url)
        except BaseException:
            self.close()
            raise

    def _open(self, url: str) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        """Wait for an event of the browser."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._receive())

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def click(self, selector: str) -> None:
        """Press the mouse's button in the middle of an element, where a person would."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left",
                clickCount=1,
            )  # fmt: skip

    def picture(self) -> bytes:
        """Return what the page looks like, as a PNG file."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _DEADLINE_S
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
