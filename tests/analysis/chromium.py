"""A real browser for tests: headless Chromium, spoken to over a pipe in its own protocol, with no other package."""

from __future__ import annotations

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

BROWSER = shutil.which("chromium")  # as Debian's package names it
WHY = "needs Chromium (Debian's package chromium)"


class Page:
    """A page in a browser of its own. errors: what went wrong in its console."""

    def __init__(self, url: str, profile: Path, *, width: int = 1280, height: int = 900, timeout: float = 180) -> None:
        self.timeout, self.errors, self._number, self._buffer = timeout, list[str](), 0, b""
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def connect() -> None:  # Chromium reads commands from descriptor 3 and answers on 4
            first, second = os.dup(to_read), os.dup(to_write)
            os.dup2(first, 3)
            os.dup2(second, 4)

        words = [BROWSER or "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        words += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars", "about:blank"]
        words.insert(1, f"--window-size={width},{height}")
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            words, preexec_fn=connect, close_fds=False, stdin=quiet, stdout=quiet, stderr=quiet
        )
        os.close(to_read)
        os.close(to_write)
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(info["targetId"] for info in targets if info["type"] == "page")
        self.session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.open(url)

    session: str | None = None

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && !!window.explorer")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._send("Browser.close")
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._read)
        os.close(self._write)

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script[:200]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + self.timeout
        while not self.run(script):
            assert time.monotonic() < end, f"waited {self.timeout} s for {script}"
            time.sleep(0.05)

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def mouse(self, kind: str, x: float, y: float) -> None:
        pressed = 0 if kind == "mouseReleased" else 1
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=pressed, clickCount=1)

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key)

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _send(self, method: str, **options: Any) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": options}
        if self.session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        return self._number

    def _call(self, method: str, **options: Any) -> dict[str, Any]:
        number, end = self._send(method, **options), time.monotonic() + self.timeout
        while True:
            while b"\0" not in self._buffer:
                ready = select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]
                assert ready, f"Chromium did not answer {method} in {self.timeout} s"
                part = os.read(self._read, 1 << 16)
                assert part, "Chromium ended"
                self._buffer += part
            text, _, self._buffer = self._buffer.partition(b"\0")
            message = json.loads(text)
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        kind, about = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"])[:500])
        elif kind == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(about["entry"]["text"])
        elif kind == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.errors.append(json.dumps(about["args"])[:500])
