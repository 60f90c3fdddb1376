"""Drive a headless Chromium through its own driver and the W3C WebDriver protocol, without further packages."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "Right": "\ue014", "End": "\ue010"}


class Browser:
    """A session of a driver that listens on ``port``."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        wanted = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self.call("POST", "/session", capabilities={"alwaysMatch": wanted})
        self.path = f"/session/{made['sessionId']}"

    def call(self, method: str, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]

    def open(self, page: Path) -> None:
        self.call("POST", f"{self.path}/url", url=page.as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.call("POST", f"{self.path}/execute/sync", script=script, args=list(arguments))

    def until(self, script: str, wanted: Any) -> None:
        """Wait until ``script`` returns ``wanted``, since a busy machine may be late."""
        for _ in range(100):
            if self.run(script) == wanted:
                return
            time.sleep(0.05)
        raise AssertionError(f"{script}: {self.run(script)!r}, not {wanted!r}")

    def devtools(self, command: str, **given: Any) -> Any:
        return self.call("POST", f"{self.path}/goog/cdp/execute", cmd=command, params=given)

    def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window and the preferred color scheme."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", media="screen", features=[scheme])

    def press(self, *keys: str) -> None:
        actions = [{"type": kind, "value": KEYS.get(k, k)} for k in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", f"{self.path}/actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def complaints(self) -> list[str]:
        """Return the errors on the console since the last call."""
        said = self.call("POST", f"{self.path}/se/log", type="browser")
        return [line["message"] for line in said if line["level"] == "SEVERE"]

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", f"{self.path}/screenshot")))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.call("DELETE", self.path)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Yield a session and always end it; skip the test if there is no Chromium."""
    driver = shutil.which("chromedriver")
    if driver is None or not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5)
                break
            time.sleep(0.1)
        session = Browser(port)
        try:
            yield session
        finally:
            session.close()
    finally:
        process.terminate()
        process.wait(10)
