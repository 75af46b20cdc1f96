"""Looks at the built site in a browser, at three widths of the window: `make docs` runs it after `make site`.

    python -m scripts.docs.look build/site --pictures build/pages

A page has a fault if code is cut off at the width of a desktop, if the page scrolls sideways at the width of a tablet
or a phone, or if a picture is not shown. A picture of every page at every width is kept. Without Chromium nothing is
looked at, and a line says so.
"""

import argparse
import base64
import contextlib
import importlib
import importlib.util
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

DESKTOP, TABLET, PHONE = 1400, 800, 500
"""Widths of the window, in CSS pixels."""
TALLEST = 6000
"""Most pixels of a page that its picture has."""
BROWSERS, DRIVER = ("chromium", "chromium-browser", "google-chrome"), "chromedriver"
MISSING = (
    "The pages were not looked at: there is no {}. On Debian: apt install chromium chromium-driver; "
    "then: pip install --editable '.[browser]'"
)

# Folds are open while code and widths are measured: what is in them must fit, too.
UNFOLDED = """const folds = [...document.querySelectorAll('details:not([open])')]
folds.forEach(fold => { fold.open = true })
const found = (() => { %s })()
folds.forEach(fold => { fold.open = false })
return found"""
CLIPPED = (
    UNFOLDED
    % """return [...document.querySelectorAll('pre')]
    .filter(block => block.scrollWidth > block.clientWidth)
    .map(block => block.innerText.split('\\n').reduce((a, b) => a.length > b.length ? a : b))"""
)
SIDEWAYS = UNFOLDED % "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
BROKEN = "return [...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
HEIGHT = "return document.documentElement.scrollHeight"


class Fault(NamedTuple):
    """What is wrong with a page at a width."""

    page: str
    width: int
    what: str

    def __str__(self) -> str:
        return f"{self.page} at {self.width} pixels: {self.what}"


def missing() -> str | None:
    """Returns what is not installed, or None if pages can be looked at."""
    if not any(map(shutil.which, BROWSERS)):
        return "browser (Chromium)"
    if not shutil.which(DRIVER):
        return DRIVER
    return None if importlib.util.find_spec("selenium") else "package selenium"


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Opens a browser without a window, and closes it at the end."""
    webdriver = importlib.import_module("selenium.webdriver")  # an extra: `make lint` has no such package
    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


def look(driver: Any, page: pathlib.Path, name: str, pictures: pathlib.Path | None = None) -> Iterator[Fault]:
    """Yields the faults of a page, and writes its pictures."""
    driver.get(page.resolve().as_uri())
    for width in (DESKTOP, TABLET, PHONE):
        resize(driver, width, 900)
        if width == DESKTOP:
            for line in driver.execute_script(CLIPPED):
                yield Fault(name, width, f"code is cut off: {line.strip()[:160]}")
            for source in driver.execute_script(BROKEN):
                yield Fault(name, width, f"a picture is not shown: {source}")
        elif pixels := driver.execute_script(SIDEWAYS):
            yield Fault(name, width, f"the page scrolls sideways by {pixels} pixels")
        if pictures:
            resize(driver, width, min(driver.execute_script(HEIGHT), TALLEST))
            target = pictures / str(width) / f"{name.replace('/', '-').removesuffix('.html')}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
            target.write_bytes(base64.b64decode(shot["data"]))


def resize(driver: Any, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def pages(site: pathlib.Path) -> list[pathlib.Path]:
    """Returns the pages that are written by hand or from docstrings, without indices and listings of code."""
    return sorted(page for folder in ("docs", "notebooks") for page in (site / folder).rglob("*.html"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("--pictures", type=pathlib.Path, help="folder to write pictures of the pages to")
    options = parser.parse_args()
    if what := missing():
        print(MISSING.format(what))
        return 0
    found, seen = [], pages(options.site)
    with browser() as driver:
        for page in seen:
            found += look(driver, page, str(page.relative_to(options.site)), options.pictures)
    for fault in found:
        print(fault)
    print(f"{len(seen)} pages at three widths: {len(found)} faults" + f"; {options.pictures}" * bool(options.pictures))
    return 1 if found or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
