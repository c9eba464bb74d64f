"""The page, opened in headless Chromium: the figures on it are bench.json's, and nothing in the data can script it."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from browser import Browser

from draftsmith.record import write_json, write_record
from draftsmith.report.compare import compare
from draftsmith.report.compare import render as side_by_side
from draftsmith.report.page import render, write_page

BENCH = {
    "tokens_per_target_step": 1.523, "acceptance_length": 1.531, "acceptance_per_position": [0.341, 0.131, 0.058],
    "drafts": 5806, "lossless": True, "ties": 0, "engine": {"name": "vllm", "version": "0.32.0"},
    "tokens_per_second": {"drafter": {"8": 98.2, "1": 22.8}, "none": {"8": 119.0, "1": 20.3}, "ngram": {"8": 138.0, "1": 24.0}},
    "ways": {"ngram": {"tokens_per_target_step": 1.23, "acceptance_length": 2.8}},
    "sets": {"mt_bench": {"tokens_per_target_step": 1.51, "acceptance_length": 1.52, "acceptance_per_position": [0.35, 0.121, 0.05],
                          "drafts": 2900}},
    "predicted": {"acceptance_per_position": [0.345, 0.131, 0.058], "texts": 80, "sets": {
        "mt_bench": {"acceptance_per_position": [0.351, 0.16, 0.05]}}},
    "by_context_length": {
        "128-255": {"acceptance_length": 1.5, "acceptance_per_position": [0.34, 0.12, 0.04], "drafts": 4000},
        "256-511": {"acceptance_length": 1.45, "acceptance_per_position": [0.31, 0.1, 0.04], "drafts": 1806}},
    "by_language": {
        "latin": {"acceptance_length": 1.6, "acceptance_per_position": [0.37, 0.14, 0.05], "drafts": 5000},
        "cyrillic": {"acceptance_length": 1.1, "acceptance_per_position": [0.08, 0.01, 0.0], "drafts": 806}},
}  # fmt: skip
DIAGNOSIS = {
    "acceptance": {"acceptance_length": 1.21, "acceptance_per_position": [0.15, 0.04, 0.02]}, "nats_per_token": 6.1, "rows": 10,
    "verdict": "likely cause found",
    "causes": [{"id": "aux.one", "cause": "one aux layer id is off: [2, 14, 27] → [2, 15, 27]", "score": 0.412,
                "evidence": ["the target's own tokens gain 0.412 nats each", "acceptance length 1.21 → 1.53 in replay"],
                "fix": "write the ids that were trained on"}],
}  # fmt: skip
FORTY = [(" The", 0), (" answer", 1), (" is", 1), (" for", 0), ("ty", 0), ("-", 1), ("two", 1), (".", 1), ("\n", 0)]
EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture
def run_folder(tmp_path):
    return write_run(tmp_path / "demo")


def write_run(folder):
    write_json(folder / "bench" / "bench.json", BENCH)
    sample = {
        "set": "mt_bench",
        "prompt": EVIL,
        "tokens": [{"text": "Hello", "accepted": False}, {"text": EVIL, "accepted": True}],
    }
    other = {"set": "gsm8k", "prompt": "6 · 7?", "tokens": [{"text": t, "accepted": bool(a)} for t, a in FORTY]}
    write_json(folder / "bench" / "samples.json", [sample, other])
    write_json(folder / "diagnose" / "diagnosis.json", DIAGNOSIS)
    write_json(folder / "recipe.json", {"name": EVIL})
    write_record(folder / "train", stage="train", key="k" * 64, inputs={}, config={}, result={"steps": 300}, started=0)
    lines = [{"step": 10, "loss": 9.5}, {"step": 20, "acceptance_length": 1.4, "acceptance_per_position": [0.3, 0.1]}]
    (folder / "train" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3')
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium") / "profile") as found:
        yield found


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """The page, opened once for all that look at it."""
    folder = tmp_path_factory.mktemp("run")
    browser.open(write_page(write_run(folder / "demo"), folder / "index.html"))
    return browser


def test_browser_shows_the_figures_and_stays_unowned(page):
    dom = page.value("document.documentElement.outerHTML")
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
    assert page.value("document.querySelectorAll('.chart .main-svg').length") >= 8, "four charts and two curves"
    assert page.value("document.title") == "demo · draftsmith"
    assert page.value("document.querySelectorAll('img').length") == 0 and "&lt;img src=x" in dom


def cells(page, row):
    return page.value(f"[...document.querySelector({json.dumps(row)}).cells].map(c => c.textContent)")


def test_predicted_stands_beside_measured_and_gaps_are_marked(page):
    assert cells(page, '[data-predicted="all.0"]') == ["all", "0", "0.345", "0.341", "+0.004"]
    assert cells(page, '[data-predicted="mt_bench.1"]') == ["mt_bench", "1", "0.160", "0.121", "+0.039"]
    marked = page.value("[...document.querySelectorAll('#predicted ~ div td.off')].map(c => c.textContent)")
    assert marked == ["+0.039"]


def test_context_and_language_buckets(page):
    assert cells(page, '[data-bucket="128-255"]') == ["128-255 tokens", "1.500", "0.340", "0.120", "0.040", "4,000"]
    assert cells(page, '[data-bucket="cyrillic"]')[2] == "0.080"


def test_the_diagnosis_stands_with_its_evidence(page):
    assert "replayed 10 rows" in page.value("document.querySelector('#diagnosis + .sub').textContent")
    assert page.value("document.querySelector('[data-cause=\"aux.one\"]').innerText").split("\n") == [
        "1. one aux layer id is off: [2, 14, 27] → [2, 15, 27]",
        "the target's own tokens gain 0.412 nats each",
        "acceptance length 1.21 → 1.53 in replay",
        "fix: write the ids that were trained on",
    ]


def shown(page):
    return page.value("[...document.querySelectorAll('.sample[data-share]:not(.hidden)')].map(s => s.dataset.set)")


def test_tokens_are_marked_by_what_became_of_them(page):
    sample = "[...document.querySelectorAll('.sample[data-set=\"gsm8k\"] .cell')]"
    assert page.value(f"{sample}.map(c => c.tagName + ' ' + c.className + ' ' + c.title)") == [
        "SPAN own cell prefill", "MARK cell position 0: accepted", "MARK cell position 1: accepted",
        "SPAN no cell position 2: the draft was rejected", "SPAN no cell position 0: the draft was rejected",
        "MARK cell position 0: accepted", "MARK cell position 1: accepted", "MARK cell position 2: accepted",
        "SPAN own cell all were accepted",
    ]  # fmt: skip


def test_filters_answer_to_real_clicks_and_keys(page):
    assert shown(page) == ["mt_bench", "gsm8k"]
    page.value("document.querySelector('#set').focus()")
    page.value("(s => { s.value = 'gsm8k'; s.dispatchEvent(new Event('input')); })(document.querySelector('#set'))")
    assert shown(page) == ["gsm8k"]
    assert page.value("document.querySelector('#shown').textContent") == "1 of 2 answers"
    page.value("(s => { s.value = ''; s.dispatchEvent(new Event('input')); })(document.querySelector('#set'))")
    page.write("#word", "forty")
    assert shown(page) == ["gsm8k"]
    faded = "getComputedStyle(document.querySelector('.sample[data-set=\"gsm8k\"] .own')).opacity"
    assert page.value(faded) == "1"
    page.click("#only")
    assert page.value(faded) == "0.25"
    assert page.value("document.querySelector('#only').getAttribute('aria-pressed')") == "true"
    page.click("#only")
    assert page.value(faded) == "1"


def test_runs_are_compared_in_the_browser(browser, run_folder, tmp_path):
    """The second run's acceptance is another: a click leaves what differs, the next one brings all back."""
    other = write_run(tmp_path / "other")
    bench = json.loads((other / "bench" / "bench.json").read_text())
    bench["acceptance_per_position"][0] = 0.5
    (other / "bench" / "bench.json").write_text(json.dumps(bench))
    page = tmp_path / "compare.html"
    page.write_text(side_by_side(compare([run_folder, other])), encoding="utf-8")
    browser.open(page)
    every = "document.querySelectorAll('tr[data-row]').length"
    left = "[...document.querySelectorAll('tr[data-row]:not(.hidden)')].map(r => r.dataset.row)"
    assert cells(browser, '[data-row="acceptance_0"]')[1:] == ["0.341", "0.500"]
    count = browser.value(every)
    assert browser.value(f"{left}.length") == count > 5
    browser.click("#only")
    assert browser.value(left) == ["acceptance_0"]
    browser.click("#only")
    assert browser.value(f"{left}.length") == count
    assert browser.value("document.querySelectorAll('.chart .main-svg').length") > 0


def test_a_phone_can_read_it(browser, run_folder, tmp_path):
    """Nothing is wider than the screen but what scrolls by itself, and no text is smaller than 12 px."""
    browser.resize(390, 800, mobile=True)
    browser.open(write_page(run_folder, tmp_path / "index.html"))
    assert browser.value("document.documentElement.scrollWidth") <= 390
    wide = "[...document.querySelectorAll('body > :not(script)')].filter(e => e.getBoundingClientRect().right > 391).length"
    assert browser.value(wide) == 0
    small = "Math.min(...[...document.querySelectorAll('td, th, p, .sample, dd')].map(e => parseFloat(getComputedStyle(e).fontSize)))"
    assert browser.value(small) >= 12


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
