"""Headless Chromium driven over a pipe (the DevTools protocol, messages ended by a zero byte): real clicks, real sizes.

with Browser(profile) as browser:
    browser.open(page)
    browser.click("#only")
    browser.value("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found, "these tests open pages in headless Chromium: install it (apt-get install chromium)"
    return found


class Browser:
    """One page of one browser. width, height: of the window in CSS pixels; mobile: a phone's viewport."""

    def __init__(self, profile: Path, width: int = 1100, height: int = 900, mobile: bool = False) -> None:
        self.profile, self.size, self.mobile = profile, (width, height), mobile
        self._number = 0
        self._rest = b""

    def __enter__(self) -> Browser:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4; a shell puts them there.
        command = [chromium(), *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        shell = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.resize(*self.size, self.mobile)
        self.ask("Page.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._out)
        os.close(self._in)
        self.process.kill()
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 20)
            assert part, "the browser ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, (method, found.get("error"))
                return dict(found["result"])

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )

    def open(self, page: Path) -> None:
        """Load a page of ours and wait until its script has run to its end."""
        self.ask("Page.navigate", url=page.as_uri())
        ready = self.value(
            "new Promise(done => { const look = () => document.body?.dataset.ready === 'yes' ? done(true)"
            " : setTimeout(look, 20); setTimeout(() => done(false), 60000); look(); })"
        )
        assert ready, "the page's script did not run to its end"

    def value(self, expression: str) -> Any:
        """What an expression gives, promises awaited."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of the element, as a hand would."""
        box = self.value(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f" return [b.x + b.width / 2, b.y + b.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def write(self, selector: str, text: str) -> None:
        """Click into a field and type."""
        self.click(selector)
        self.ask("Input.insertText", text=text)

    def screenshot(self, path: Path, selector: str | None = None, pad: int = 8, window: bool = False) -> Path:
        """One element with a little around it, the whole page, or (window) what the window shows, as PNG."""
        more: dict[str, Any] = {}
        if not window:
            x, y, w, h = self.value(
                "(e => { const b = e.getBoundingClientRect(); return [b.x + scrollX, b.y + scrollY, b.width, b.height]; })"
                f"({f'document.querySelector({json.dumps(selector)})' if selector else 'document.documentElement'})"
            )
            clip = {"x": max(x - pad, 0), "y": max(y - pad, 0), "width": w + 2 * pad, "height": h + 2 * pad, "scale": 1}
            more = {"captureBeyondViewport": True, "clip": clip}
        found = self.ask("Page.captureScreenshot", format="png", **more)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path
