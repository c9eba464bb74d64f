"""The docs: the generated reference is what the code says now, and every page of the site is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_reference_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"run `python docs/generate.py`: {done.stdout}{done.stderr}"


def pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    if isinstance(nav, dict):
        return [p for v in nav.values() for p in pages(v)]
    return [p for item in nav for p in pages(item)] if isinstance(nav, list) else []


def test_every_page_of_the_site_is_there_and_none_is_left_out() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(pages(site["nav"]))
    there = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert listed == there
