"""Chromium without a window, driven by selenium: for the page's tests and its pictures."""

from __future__ import annotations

import base64
import os
import shutil
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")


def missing() -> str | None:
    """Why there is no browser here, or None."""
    if CHROMIUM is None or DRIVER is None:
        return "needs chromium and chromedriver (apt-get install chromium chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "needs selenium, which `make` installs"
    return None


class Browser:
    """One window of a width and height in CSS pixels; it ends with the block."""

    def __init__(self, width: int, height: int, *, dark: bool = False):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium has no sandbox for root
        for flag in flags:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self._command("Emulation.setTimezoneOverride", timezoneId="Europe/Berlin")  # where clocks are changed
        self.show(width, height, dark=dark)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object):
        self.driver.quit()

    def show(self, width: int, height: int, *, dark: bool = False):
        """Another width, height and scheme of colours."""
        size = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        self._command("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str):
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What the page's JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, seconds: float = 30):
        """Until the script returns something true."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, seconds, poll_frequency=0.1).until(lambda _: self.run(script))

    def errors(self) -> list[str]:
        """What the console said above the level of information."""
        return [line["message"] for line in self.driver.get_log("browser") if line["level"] not in ("INFO", "DEBUG")]

    def picture(self, path: Path, end: str):
        """The page from its top to where the element `end` (a CSS selector) begins, as a PNG."""
        width = self.run("return document.documentElement.clientWidth")
        height = self.run("return document.querySelector(arguments[0]).getBoundingClientRect().top + scrollY", end)
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        data = self._command("Page.captureScreenshot", captureBeyondViewport=True, format="png", clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def _command(self, name: str, **arguments: Any) -> dict[str, Any]:
        answer = self.driver.execute_cdp_cmd(name, arguments)
        return answer
