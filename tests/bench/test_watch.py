"""A production server watched: falls are told with their beginning, chance is not, restarts end a window."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.bench.watch import Event, Expected, Reading, Watcher, Window
from draftsmith.cli.main import app
from draftsmith.engine.metrics import Counters
from draftsmith.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from fake_endpoint import FakeEndpoint

BENCH = {"acceptance_length": 1.53, "acceptance_per_position": [0.34, 0.13, 0.06], "drafts": 5800}


class Server:
    """A made-up server: every second, `drafts` drafts of which position i is accepted at rates[i]."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.at, self.born = 1000.0, 5.0
        self.identity = {"engine version": "0.32.0"}
        self.zero()

    def zero(self) -> None:
        self.drafts, self.per, self.tokens, self.prompt = 0, [0, 0, 0], 0, 0

    def run(self, drafts: int, rates: tuple[float, ...], prompt: int = 100) -> Reading:
        for _ in range(drafts):
            draw, n = self.rng.random(), 0
            while n < 3 and draw < rates[n]:
                self.per[n] += 1
                n += 1
            self.tokens += n + 1
        self.drafts += drafts
        self.prompt += prompt
        self.at += 10.0
        return self.look()

    def look(self) -> Reading:
        counters = Counters(
            "vllm", self.drafts, 3 * self.drafts, sum(self.per), list(self.per), self.tokens, self.prompt, 0, 0, True,
            {"process_start_time_seconds": self.born},
        )  # fmt: skip
        return Reading(self.at, counters, dict(self.identity))


GOOD, BAD = (0.34, 0.13, 0.06), (0.15, 0.03, 0.01)


def events(watcher: Watcher, readings: list[Reading]) -> list[Event]:
    return [e for r in readings for e in watcher.observe(r)]


def kinds(found: list[Event]) -> list[str]:
    return [e.kind for e in found if e.kind != "window"]


@pytest.mark.parametrize("seed", range(5))
def test_chance_is_no_fall(seed: int) -> None:
    server, watcher = Server(seed), Watcher(Expected.of(BENCH))
    found = events(watcher, [server.look(), *(server.run(60, GOOD) for _ in range(200))])
    assert kinds(found) == []
    windows = [e for e in found if e.kind == "window"]
    assert len(windows) == 50 and all(e.figures["drafts"] == 240 for e in windows)


@pytest.mark.parametrize("seed", range(5))
def test_a_fall_is_told_with_its_beginning(seed: int) -> None:
    server, watcher = Server(seed), Watcher(Expected.of(BENCH))
    found = events(watcher, [server.look(), *(server.run(240, GOOD) for _ in range(4))])
    began = server.at
    found += events(watcher, [server.run(240, BAD) for _ in range(4)])
    assert kinds(found) == ["fallen"]
    fallen = next(e for e in found if e.kind == "fallen")
    assert fallen.since == began and watcher.fallen
    assert "measured 1.530" in fallen.text
    assert kinds(events(watcher, [server.run(1000, GOOD, prompt=400)])) == ["back"]
    assert not watcher.fallen


def test_what_changed_at_that_time_is_told_beside_it() -> None:
    server, watcher = Server(), Watcher(Expected.of(BENCH))
    events(watcher, [server.look(), *(server.run(240, GOOD) for _ in range(3))])
    server.identity["engine version"] = "0.33.0"
    server.zero()
    server.born += 100
    found = events(watcher, [server.run(240, BAD, prompt=900) for _ in range(4)])
    assert kinds(found)[:2] == ["changed", "restart"]
    fallen = next(e for e in found if e.kind == "fallen")
    assert fallen.figures["near"] == [
        "engine version changed: 0.32.0 → 0.33.0", "the server was restarted",
        next(e.text for e in found if e.text.startswith("other traffic")),
    ]  # fmt: skip


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_restart_is_never_averaged_over(overtaken: bool) -> None:
    """Even where the new process has counted more than the old one by the time of the next look."""
    server, watcher = Server(), Watcher(None, min_drafts=300)
    events(watcher, [server.look(), server.run(200, GOOD)])
    server.zero()
    server.born += 100
    found = events(watcher, [server.run(900 if overtaken else 50, BAD), server.run(300, BAD)])
    assert kinds(found) == ["restart"]
    windows = [e for e in found if e.kind == "window"]
    assert [w.figures["drafts"] for w in windows] == [200, 300]
    assert windows[0].figures["acceptance_length"] > 1.4 > 1.25 > windows[1].figures["acceptance_length"]


def test_the_spread_is_that_of_the_draws() -> None:
    rng = random.Random(1)
    lengths = []
    for _ in range(300):
        server = Server(rng.randrange(1 << 30))
        before, after = server.look(), server.run(100, GOOD)
        window = Window(before.at, after.at, after.counters.since(before.counters))
        lengths.append(window.length)
    mean = sum(lengths) / len(lengths)
    true = (sum((x - mean) ** 2 for x in lengths) / len(lengths)) ** 0.5
    assert window.spread == pytest.approx(true, rel=0.25)


def test_a_bench_without_a_drafter_is_refused() -> None:
    with pytest.raises(UserError, match="measured no drafter"):
        Expected.of({"acceptance_length": 1.0, "drafts": 0})


def ask(url: str, threads: int = 3) -> None:
    import httpx

    def one() -> None:
        httpx.post(url + "/v1/chat/completions", json={"max_tokens": 61}, timeout=60)

    running = [threading.Thread(target=one) for _ in range(threads)]
    for t in running:
        t.start()
    for t in running:
        t.join()


def follow(url: str, *options: str) -> tuple[int, list[dict[str, object]]]:
    done = CliRunner().invoke(app, ["watch", url, "--every", "0.05", "--min-drafts", "20", "--json", *options])
    assert not isinstance(done.exception, UserError), done.exception
    return done.exit_code, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("expect, code", [("2.0", 0), ("3.5", 1)])
def test_the_command_against_a_server(expect: str, code: int, tmp_path: Path) -> None:
    with FakeEndpoint(pattern=[2, 0, 1], ttft=0.0, itl=0.001) as server:
        threading.Thread(target=lambda: [ask(server.url) for _ in range(4)], daemon=True).start()
        log = tmp_path / "watch.jsonl"
        found, told = follow(server.url, "--expect", expect, "--for", "2.5", "--log", str(log))
    assert found == code
    windows = [e for e in told if e["kind"] == "window"]
    assert windows and all(abs(float(str(w["acceptance_length"])) - 2.0) < 0.2 for w in windows)
    assert any(e["kind"] == "fallen" for e in told) is bool(code)
    assert [json.loads(x) for x in log.read_text().splitlines()] == told


def test_a_restart_of_a_server_is_told() -> None:
    with FakeEndpoint(pattern=[2, 0, 1], ttft=0.0, itl=0.0, reset_after=1) as server:
        threading.Thread(target=lambda: (time.sleep(0.6), ask(server.url, 1)), daemon=True).start()
        _, told = follow(server.url, "--for", "2.0")
    assert [e["kind"] for e in told if e["kind"] == "restart"] == ["restart"]


def test_a_server_that_drafts_nothing_is_one_block() -> None:
    with FakeEndpoint(None) as server:
        done = CliRunner().invoke(app, ["watch", server.url, "--for", "0.1"])
    assert isinstance(done.exception, UserError) and "drafts nothing" in done.exception.what
