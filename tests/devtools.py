"""Drive a headless Chromium over the pipe of the DevTools protocol, with the standard library alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path


class Browser:
    """A headless Chromium with one page.

    Messages are JSON, each ended by a NUL: Chromium reads them from file descriptor 3 and writes to
    4. https://chromedevtools.github.io/devtools-protocol/
    """

    def __init__(self, chromium: str, profile: Path) -> None:
        to_browser, self._requests = os.pipe()
        self._answers, from_browser = os.pipe()
        # The shell moves the two ends to the numbers that Chromium expects.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        command = [
            chromium,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._received, self._session = 0, b"", None
        #: Exceptions, and messages of the console and of policies.
        self.problems: list[dict] = []
        self._loads = 0
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]

    def call(self, method: str, **parameters: object) -> dict:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message: dict = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict:
        """The next message, be it an answer or an event."""
        while b"\0" not in self._received:
            part = os.read(self._answers, 2**16)
            assert part, "Chromium has ended"
            self._received += part
        text, _, self._received = self._received.partition(b"\0")
        message = json.loads(text)
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(message["params"])
        self._loads += message.get("method") == "Page.loadEventFired"
        return message

    def open(self, address: str, width: int = 1400, height: int = 900) -> None:
        """Open an address in a window of this size, and wait until its scripts have run."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.enable")
        loads = self._loads
        self.call("Page.navigate", url=address)
        while self._loads == loads:
            self._next()

    def evaluate(self, expression: str):
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str):
        """Wait until a JavaScript expression is true, and return its value; fail after 20 s."""
        return self.evaluate(
            "new Promise((done, fail) => { const end = Date.now() + 20000; const look = () => { "
            f"const value = (() => {condition})(); if (value) done(value); "
            "else if (Date.now() > end) fail(new Error('never true')); "
            "else setTimeout(look, 10); }; look(); })"
        )

    def choose_files(self, selector: str, paths: list[Path]) -> None:
        """Choose files in a file input, as a user does."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def close(self) -> None:
        """End the browser."""
        os.close(self._requests)
        self._process.terminate()
        self._process.wait()
        os.close(self._answers)
