"""The pictures in docs/img, made from a real run's page in headless Chromium:

python tests/report/screenshots.py runs/demo docs/img [--compare RUN RUN]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from browser import Browser

from draftsmith.report.compare import compare, render
from draftsmith.report.page import write_page

LIGHT = "document.documentElement.style.colorScheme = 'light'"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--compare", type=Path, nargs="+", default=[])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftsmith-pictures-") as work:
        folder = Path(work)
        page = write_page(args.run.resolve(), folder / "index.html")
        with Browser(folder / "profile", width=1000, height=800) as browser:
            browser.open(page)
            browser.value(LIGHT)
            browser.resize(1000, 620)
            browser.screenshot(args.out / "report.png", window=True)
            if browser.value("!!document.querySelector('#samples')"):
                browser.click("#only")
                browser.screenshot(args.out / "tokens.png", ".sample[data-share]:not(.hidden)")
            if browser.value("!!document.querySelector('.cause')"):
                browser.screenshot(args.out / "diagnosis.png", ".cause")
            browser.screenshot(args.out / "charts.png", ".charts")
            browser.resize(390, 780, mobile=True)
            browser.open(page)
            browser.screenshot(args.out / "phone.png", window=True)
            if args.compare:
                (folder / "compare.html").write_text(render(compare(args.compare)), encoding="utf-8")
                browser.resize(1000, 620)
                browser.open(folder / "compare.html")
                browser.screenshot(args.out / "compare.png", window=True)
    for picture in sorted(args.out.glob("*.png")):
        print(f"{picture} {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
