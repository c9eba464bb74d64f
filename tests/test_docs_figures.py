"""No figure without its file: README, the docs and benchmarks/README say what benchmarks/results holds, and no more."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w-]|\.\d)")
ROW = re.compile(r"^\|(.+)\|([^|]*)\|([^|]*)\| `(\w+)` \|$", re.M)


def numbers(value: Any) -> Iterator[float]:
    """Every number of a result, those in its texts too."""
    if isinstance(value, dict):
        for v in value.values():
            yield from numbers(v)
    elif isinstance(value, list):
        for v in value:
            yield from numbers(v)
    elif isinstance(value, bool):
        return
    elif isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, str):
        yield from (float(n) for n in re.findall(r"\d+(?:\.\d+)?", value.replace(",", "")))


def said(text: str) -> list[str]:
    return NUMBER.findall(text.replace("×", ""))


def holds(figure: dict[str, Any], number: str) -> bool:
    """Whether a number, as it is printed, is one of the file's, rounded as it is printed."""
    digits = len(number.partition(".")[2])
    wanted = float(number.replace(",", ""))
    if digits == 0 and wanted < 100:
        return any(n == wanted for n in numbers(figure))
    half = 0.5 * 10.0**-digits
    return any(abs(n - wanted) <= half * 1.0001 for n in numbers(figure))


def load(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    assert path.is_file(), f"{name} is quoted, but there is no {path.name}"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def table() -> list[tuple[str, str, str, str]]:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Figures")[2].partition("\n## ")[0]
    return [(m[1], m[2], m[3], m[4]) for m in ROW.finditer(text)]


def test_every_row_of_readmes_table_is_in_its_file() -> None:
    rows = table()
    assert len(rows) >= 5
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Figures")[2].partition("\n## ")[0]
    assert len(rows) == sum(line.startswith("| ") for line in text.splitlines()) - 1, "a row names no file"
    for claim, ours, theirs, name in rows:
        figure = load(name)
        for part in (claim, ours, theirs):
            for number in said(part):
                assert holds(figure, number), f"README says {number} ({part.strip()}); {name}.json does not"
        assert said(ours), f"the row of {name} gives no figure"


def test_figures_in_readmes_text_are_in_some_file() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^(\||    ).*$|```.*?```|<!--.*?-->", "", text, flags=re.M | re.S)
    figures = [json.loads(p.read_text(encoding="utf-8")) for p in RESULTS.glob("*.json")]
    quoted = re.findall(r"(\d[\d,]*(?:\.\d+)?)(?: minutes| GiB| GB| tok/s|\s+tokens\s+per\s+target\s+step|×)", prose)
    assert quoted
    for number in quoted:
        digits = len(number.partition(".")[2])
        assert any(round(n, digits) == float(number.replace(",", "")) for f in figures for n in numbers(f)), (
            f"README says {number}, which no file of benchmarks/results holds"
        )


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.stem)
def test_pages_that_quote_a_file_quote_it_right(page: Path) -> None:
    for paragraph in page.read_text(encoding="utf-8").split("\n\n"):
        names = re.findall(r"benchmarks/results/(\w+)\.json", paragraph)
        if "<!--" in paragraph:
            for name in names:
                load(name)
            continue
        figures = [load(n) for n in names]
        for number in said(paragraph) if figures else []:
            if "," in number or "." in number:
                assert any(holds(f, number) for f in figures), f"{page.name} says {number}; {', '.join(names)} do not"


def test_the_benchmarks_page_is_made_from_the_files() -> None:
    spec = importlib.util.spec_from_file_location("make_readme", ROOT / "benchmarks" / "make_readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert found == module.page(), "run python benchmarks/make_readme.py"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_every_result_names_a_script_that_is_there(path: Path) -> None:
    figure = load(path.stem)
    script = re.search(r"benchmarks/\w+\.py", figure["command"])
    assert script and (ROOT / script[0]).is_file(), f"{path.name}: {figure['command']}"
    assert (
        figure["rows"]
        and re.fullmatch(r"20\d\d-\d\d-\d\d", figure["date"])
        and figure["versions"]
        and figure["machine"]
    )
    if isinstance(figure["ratio"], int | float):
        # of paired rounds it may be the median of their ratios, which is near the ratio of the medians
        assert figure["ratio"] == pytest.approx(figure["ours"] / figure["theirs"], rel=0.05)
