"""A bench that was killed goes on: what was measured is not measured again. And the ways of one bench compared."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.bench.run import run_bench
from draftsmith.bench.sampling import SamplingTest
from draftsmith.bench.ways import Opened, Plan
from draftsmith.capture.prompts import Prompt
from draftsmith.engine.client import EngineClient
from draftsmith.record import read_json
from draftsmith.ui import QuietUi

sys.path.insert(0, str(Path(__file__).parent))
from fake_endpoint import FakeEndpoint

SETS = {s: [Prompt(f"{s}{i}", s, [{"role": "user", "content": f"{s} {i}"}]) for i in range(6)] for s in ("a", "b")}


class KilledError(Exception):
    pass


class Fakes:
    """An opener over one fake server per way; `dies` names a way whose server cannot be opened (once)."""

    def __init__(self, servers: dict[str, FakeEndpoint], dies: str | None = None) -> None:
        self.servers, self.dies, self.opened = servers, dies, list[str]()

    @contextlib.contextmanager
    def __call__(self, way: str) -> Iterator[Opened]:
        if way == self.dies:
            self.dies = None
            raise KilledError
        self.opened.append(way)
        yield Opened(lambda: EngineClient(self.servers[way].url), {"raw_logits": True})


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    quick = {"ttft": 0.0, "itl": 0.0}
    with (
        FakeEndpoint([2, 0, 1], **quick) as drafter,
        FakeEndpoint([0, 3], **quick) as ngram,
        FakeEndpoint(None, **quick) as none,
    ):
        yield Fakes({"drafter": drafter, "ngram": ngram, "none": none})


PLAN = Plan(SETS, [4, 1], max_tokens=11, single_prompts=4, single_max_tokens=7)
WAYS = ["drafter", "none", "ngram"]
ENGINE = {"name": "fake", "version": "1"}


def test_finished_ways_are_not_measured_again(fakes: Fakes, tmp_path: Path) -> None:
    fakes.dies = "none"
    with pytest.raises(KilledError):
        run_bench(PLAN, WAYS, fakes, tmp_path, ENGINE, QuietUi())
    asked = {w: len(s.requests) for w, s in fakes.servers.items()}
    kept = {p: p.read_bytes() for p in (tmp_path / "ways").rglob("*.json")}
    bench = run_bench(PLAN, WAYS, fakes, tmp_path, ENGINE, QuietUi())
    assert fakes.opened == ["drafter", "ngram", "none"]
    assert {w: len(fakes.servers[w].requests) for w in ("drafter", "ngram")} == {
        k: asked[k] for k in ("drafter", "ngram")
    }
    assert all(p.read_bytes() == raw for p, raw in kept.items())
    assert bench["ways"]["ngram"]["acceptance_per_position"] == [0.5, 0.5, 0.5]


def test_a_way_killed_in_its_middle_goes_on_with_the_next_pass(fakes: Fakes, tmp_path: Path) -> None:
    run_bench(PLAN, ["drafter"], fakes, tmp_path, ENGINE, QuietUi())
    home = tmp_path / "ways" / "drafter"
    (home / "way.json").unlink()
    (home / "c1-mixed.json").unlink()
    first = (home / "c4-a.json").read_bytes()
    before = len(fakes.servers["drafter"].requests)
    run_bench(PLAN, ["drafter"], fakes, tmp_path, ENGINE, QuietUi())
    warm_up, single = 4, 4
    assert len(fakes.servers["drafter"].requests) - before == warm_up + single
    assert (home / "c4-a.json").read_bytes() == first


def test_the_keys_that_others_read(fakes: Fakes, tmp_path: Path) -> None:
    bench = run_bench(PLAN, WAYS, fakes, tmp_path, ENGINE, QuietUi(), decode=lambda ids: "".join(f"<{i}>" for i in ids))
    assert bench == read_json(tmp_path / "bench.json")
    assert list(bench["ways"]) == WAYS and list(bench["sets"]) == ["a", "b"]
    assert set(bench["tokens_per_second"]) == set(WAYS)
    assert all(set(by) == {"1", "4"} for by in bench["tokens_per_second"].values())
    assert (bench["lossless"], bench["ties"], bench["losslessness"]["compared"]) == (True, 0, 4)
    assert bench["losslessness"]["batched"] == {"concurrency": 4, "compared": 12, "equal": 12, "shown": []}
    samples = read_json(tmp_path / "samples.json")
    assert {s["set"] for s in samples} == {"a", "b"}
    # the first from the prefill, then 2 accepted + 1, 0 + 1, 1 + 1 and so on
    marks = [t["accepted"] for t in samples[0]["tokens"]]
    assert marks[:7] == [False, True, True, False, False, True, False]
    assert "".join(t["text"] for t in samples[0]["tokens"]).startswith("<100><101>")


@pytest.mark.parametrize(("shift", "verdict"), [(0, "same"), (7, "different")])
def test_sampling_is_judged_beside(fakes: Fakes, tmp_path: Path, shift: int, verdict: str) -> None:
    fakes.servers["drafter"].token = lambda i: 100 + i % 7 + (shift if i else 0)
    plan = Plan(SETS, [4], max_tokens=4, sampling_test=SamplingTest(0.7, prompts=3, count=6, tokens=4))
    bench = run_bench(plan, ["drafter", "none"], fakes, tmp_path, ENGINE, QuietUi())
    assert bench["sampling"]["verdict"] == verdict
    assert bench["sampling"]["score_difference"] == pytest.approx(-shift)
    assert any("temperature 0.7" in n for n in bench["notices"]) is (verdict == "different")
    assert bench["lossless"] is None
