"""A real browser for tests of pages: headless Chromium, spoken to through its debugging pipe. No page may reach a
network."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next((path for name in NAMES if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")
SECONDS = 60


class Browser:
    """A page in Chromium. `problems` collects console errors and exceptions of the page, `requests` what it fetched."""

    def __init__(self, width=1000, height=700):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours, theirs = os.pipe(), os.pipe()
        words = [
            PROGRAM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        words += ["--remote-debugging-pipe", f"--user-data-dir={self.folder.name}", f"--window-size={width},{height}"]
        words += ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--no-first-run"]

        def connect():  # Chromium reads commands from 3 and answers on 4
            os.dup2(ours[0], 103), os.dup2(theirs[1], 104)
            os.dup2(103, 3), os.dup2(104, 4)

        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen([*words, "about:blank"], preexec_fn=connect, close_fds=False, **quiet)
        os.close(ours[0]), os.close(theirs[1])
        self.out, self.answers, self.buffer = ours[1], theirs[0], b""
        self.number, self.session, self.problems, self.requests = 0, None, [], []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        shape = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setDeviceMetricsOverride", **shape)

    def send(self, method, **params):
        """The result of a command."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self.number:
                assert "error" not in found, found["error"]
                return found["result"]
            self._note(found)

    def _next(self):
        end = time.monotonic() + SECONDS
        while b"\0" not in self.buffer:
            left = end - time.monotonic()
            ready = left > 0 and select.select([self.answers], [], [], left)[0]
            data = os.read(self.answers, 1 << 20) if ready else b""
            assert data, "Chromium does not answer"
            self.buffer += data
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path):
        """Loads a file and waits until it has drawn."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + SECONDS
        while self.run("document.readyState") != "complete" and time.monotonic() < end:
            time.sleep(0.05)
        self.settle()

    def run(self, expression):
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def settle(self):
        """Waits for two frames."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def mouse(self, kind, x, y, **more):
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", buttons=int(kind == "mousePressed"), clickCount=1)
        self.settle()

    def drag(self, x, y, dx, dy, modifiers=0):
        held = dict(button="left", modifiers=modifiers)
        self.mouse("mousePressed", x, y, buttons=1, clickCount=1, **held)
        for step in range(1, 5):
            self.mouse("mouseMoved", x + dx * step / 4, y + dy * step / 4, buttons=1, **held)
        self.mouse("mouseReleased", x + dx, y + dy, buttons=0, clickCount=1, **held)
        self.settle()

    def wheel(self, x, y, by):
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=by)
        time.sleep(0.1)
        self.settle()

    def key(self, name):
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name)
        self.settle()

    def choose(self, id, value):
        """Sets a select, a range or a checkbox as a user does, with its event."""
        self.run(f"""(() => {{ const e = document.getElementById({json.dumps(id)}); e.value = {json.dumps(value)};
            e.dispatchEvent(new Event("input")); e.dispatchEvent(new Event("change")); }})()""")
        self.settle()

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self.out), os.close(self.answers)
        self.folder.cleanup()
