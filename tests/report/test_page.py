"""The page, opened in headless Chromium: the figures on it are bench.json's, and nothing in the data can script it."""

import json
import re
import shutil
import subprocess

import pytest

from draftsmith.record import write_json, write_record
from draftsmith.report.page import render, write_page

BENCH = {
    "tokens_per_target_step": 1.523, "acceptance_length": 1.531, "acceptance_per_position": [0.341, 0.131, 0.058],
    "drafts": 5806, "lossless": True, "ties": 0, "engine": {"name": "vllm", "version": "0.32.0"},
    "tokens_per_second": {"drafter": {"8": 98.2, "1": 22.8}, "none": {"8": 119.0, "1": 20.3}, "ngram": {"8": 138.0, "1": 24.0}},
    "ways": {"ngram": {"tokens_per_target_step": 1.23, "acceptance_length": 2.8}},
    "sets": {"mt_bench": {"tokens_per_target_step": 1.51, "acceptance_length": 1.52, "acceptance_per_position": [0.35, 0.121, 0.05],
                          "drafts": 2900}},
}  # fmt: skip
EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "demo"
    write_json(folder / "bench" / "bench.json", BENCH)
    sample = {
        "set": "mt_bench",
        "prompt": EVIL,
        "tokens": [{"text": "Hello", "accepted": False}, {"text": EVIL, "accepted": True}],
    }
    write_json(folder / "bench" / "samples.json", [sample])
    write_json(folder / "recipe.json", {"name": EVIL})
    write_record(folder / "train", stage="train", key="k" * 64, inputs={}, config={}, result={"steps": 300}, started=0)
    lines = [{"step": 10, "loss": 9.5}, {"step": 20, "acceptance_length": 1.4, "acceptance_per_position": [0.3, 0.1]}]
    (folder / "train" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3')
    return folder


def chromium():
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found, "this test opens the page in headless Chromium: install it (apt-get install chromium)"
    return found


def dump_dom(page, tmp_path):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
             "--virtual-time-budget=10000"]  # fmt: skip
    done = subprocess.run(
        [chromium(), *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=400
    )
    return done.stdout


def test_browser_shows_the_figures_and_stays_unowned(run_folder, tmp_path):
    dom = dump_dom(write_page(run_folder, tmp_path / "index.html"), tmp_path)
    assert 'data-ready="yes"' in dom, "the page's script did not run to its end"
    figures = dict(re.findall(r'data-figure="([a-z_0-9]+)">([^<]*)<', dom))
    assert figures == {"tokens_per_target_step": "1.523", "acceptance_length": "1.531", "acceptance_at_0": "0.341",
                       "lossless": "yes", "drafts": "5,806"}  # fmt: skip
    ngram = re.search(r'data-way="ngram">(.*?)</tr>', dom, re.S).group(1)
    assert re.findall(r"<td>(.*?)</td>", ngram) == [
        "ngram",
        "1.230",
        "2.800",
        "138.0",
        "24.0",
        "1.16× at 8, 1.18× at 1",
    ]
    assert dom.count('class="main-svg"') >= 4, "acceptance, speed and two curves are drawn"
    assert "<title>demo · draftsmith</title>" in dom
    assert "<img" not in dom and "&lt;img src=x" in dom, "data is shown as text, never as markup"


def test_page_needs_nothing_from_outside(run_folder):
    page = render_page(run_folder)
    body = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", body)
    assert "default-src 'none'" in page


def test_run_without_bench_still_has_a_page(tmp_path):
    folder = tmp_path / "half"
    write_record(folder / "capture", stage="capture", key="k" * 64, inputs={}, config={}, result={"rows": 5}, started=0)
    page = render_page(folder)
    assert "rows 5" in page and "not measured" in page


def render_page(folder):
    from draftsmith.report.data import gather

    return render(gather(folder))
