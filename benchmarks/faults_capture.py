"""Claim: whatever fails while the target is asked, every (prompt, sample) is stored exactly once, with its own ids.

Three stub servers stand behind proxies that spoil 20 % of all answers (429, 500, resets in mid-body, 60 s stalls,
truncated JSON, another's ids); two of the three servers are killed in turn and come back; capture itself is killed with
SIGKILL at 20 random moments, all within the run: some while it starts, the others after a random number of new rows.
Every row is then compared with what the deterministic stub says for that prompt and seed. The second part captures a
million prompts and reads the peak anonymous memory of the capturing process. There the stub answers inside that process
(its memory is counted too); with --wire it stands behind a socket, which takes much longer.

    python benchmarks/faults_capture.py [--prompts 2000] [--kills 20] [--million 1000000] [--wire]

With --work FOLDER --stop-after SECONDS the second part is killed after so long and goes on at the next call; the peak is
that of all its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from _figures import RESULTS, write

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "capture")]

from fault_proxy import FaultProxy  # noqa: E402
from stub_server import Stub  # noqa: E402

from conftest import write_byte_tokenizer  # noqa: E402
from draftsmith.capture.ask import sample_seed  # noqa: E402
from draftsmith.capture.plan import plan_prompts  # noqa: E402
from draftsmith.capture.prompts import Rules  # noqa: E402
from draftsmith.capture.rows import count_rows, iter_rows  # noqa: E402

INSIDE = """
import sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from stub_server import Stub
from draftsmith.engine.client import Answer, EngineClient

class StubClient(EngineClient):
    stub = Stub(Path({tokenizer!r}))

    async def chat(self, messages, **sampling):
        found = self.stub.reply("", {{"messages": messages, **sampling}})
        choice = found["choices"][0]
        return Answer(found["prompt_token_ids"], choice["token_ids"], choice["message"]["content"], "",
                      choice["finish_reason"], found["usage"], "stub")

    async def tokenize(self, prompt, **fields):
        return self.stub.render(prompt)

clients = [StubClient("http://inside", "stub")]
"""

DRIVER = """
import json, sys
from pathlib import Path
from draftsmith.capture.ask import Settings
from draftsmith.capture.plan import plan_prompts
from draftsmith.capture.prompts import Rules
from draftsmith.capture.run import Servers, capture_rows
from draftsmith.target.tokenizer import TargetTokenizer
from draftsmith.ui import QuietUi
a = json.loads(sys.argv[1])
plan = plan_prompts([a["prompts"]], [], 0, Rules(), 0.5)
tokenizer = TargetTokenizer.load(Path(a["tokenizer"])) if a["tokenizer"] else None
servers = Servers(a["urls"], globals().get("clients", ()), limit=a["limit"], timeout=a["timeout"], backoff=0.05)
found = capture_rows(plan, Path(a["rows"]), Settings(), servers, tokenizer, QuietUi(), samples=a["samples"],
                     every_rows=a["every"])
Path(a["rows"], "..", "result.json").resolve().write_text(json.dumps(found))
"""


class StubProcess:
    """A stub server in a process of its own, so that it can be killed."""

    def __init__(self, tokenizer: Path, port: int = 0) -> None:
        command = [sys.executable, str(TESTS / "capture" / "stub_server.py"), str(tokenizer), str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def write_prompts(path: Path, count: int) -> Path:
    with path.open("w") as f:
        for i in range(count):
            f.write(json.dumps({"prompt": f"question number {i} about nothing in particular"}) + "\n")
    return path


def start(arguments: dict[str, Any], before: str = "") -> subprocess.Popen[bytes]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen([sys.executable, "-c", before + DRIVER, json.dumps(arguments)], env=env)


def kill_servers_in_turn(servers: list[StubProcess], tokenizer: Path, stop: threading.Event, log: Counter[str]) -> None:
    """The first, then the second, each away for five seconds, then back at its port."""
    turn = 0
    while not stop.wait(8.0):
        at = turn % 2
        servers[at].kill()
        log["servers killed"] += 1
        stop.wait(5.0)
        servers[at] = StubProcess(tokenizer, servers[at].port)
        turn += 1


def compare(rows: Path, prompts: Path, tokenizer: Path, samples: int) -> Counter[str]:
    """Every row with what the stub says; counts right, foreign, doubled, missing."""
    stub, out = Stub(tokenizer), Counter({"right": 0, "foreign": 0})
    texts = {p.prompt_id: p.messages for p in plan_prompts([str(prompts)], [], 0, Rules(), 0.5)}
    seen: Counter[tuple[str, int]] = Counter()
    for row in iter_rows(rows):
        seen[row.prompt_id, row.sample] += 1
        ids = stub.render(texts[row.prompt_id])
        words = stub.words(ids, sample_seed(0, row.prompt_id, row.sample, 0))
        right = row.token_ids == [*ids, *stub.encode(words), stub.end] and row.boundary == len(ids)
        out["right" if right and row.answer_text == words else "foreign"] += 1
    out["doubled"] = sum(n > 1 for n in seen.values())
    out["missing"] = len(texts) * samples - len(seen)
    return out


def faults(work: Path, tokenizer: Path, count: int, kills: int) -> dict[str, Any]:
    samples, rng, log = 2, random.Random(0), Counter[str]()
    prompts, rows = write_prompts(work / "prompts.jsonl", count), work / "rows"
    stop = threading.Event()
    with ExitStack() as stack:
        servers = [StubProcess(tokenizer) for _ in range(3)]
        stack.callback(lambda: [s.kill() for s in servers])
        proxies = [stack.enter_context(FaultProxy(s.url, 0.2, 60.0, seed=i)) for i, s in enumerate(servers)]
        killer = threading.Thread(target=kill_servers_in_turn, args=(servers, tokenizer, stop, log))
        killer.start()
        arguments = {
            "prompts": str(prompts),
            "rows": str(rows),
            "tokenizer": str(tokenizer),
            "urls": [p.url for p in proxies],
            "limit": 16,
            "timeout": 3.0,
            "samples": samples,
            "every": 50,
        }
        closed: dict[str, bytes] = {}
        while True:
            before, process = count_rows(rows) if rows.exists() else 0, start(arguments)
            if log["capture killed"] < kills:
                # Half of what is left, shared by the kills to come, so that none of them falls behind the end.
                share = (samples * count - before) // (2 * (kills - log["capture killed"]))
                target = before + rng.randrange(1, max(2, 2 * share))
                deadline = time.monotonic() + (120 if rng.random() < 0.75 else 3 * rng.random())
                while process.poll() is None and time.monotonic() < deadline:
                    if rows.exists() and count_rows(rows) >= target:
                        time.sleep(rng.random() * 0.1)
                        break
                    time.sleep(0.02)
                process.send_signal(signal.SIGKILL)
                log["capture killed"] += process.wait() == -signal.SIGKILL
            else:
                process.wait()
            now = {p.name: p.read_bytes() for p in rows.glob("part-*.parquet")}
            log["closed parts changed"] += sum(now.get(n) != b for n, b in closed.items())
            closed = now
            if process.returncode == 0:
                break
        stop.set()
        killer.join()
        injected = sum((p.injected for p in proxies), Counter[str]())
    found = compare(rows, prompts, tokenizer, samples)
    return {"units": count * samples, **found, **log, "injected": dict(injected)}


def million(work: Path, tokenizer: Path, count: int, wire: bool, stop_after: float) -> dict[str, Any]:
    """The figures; with "exit" None where the time was over before the end."""
    prompts, so_far = work / "million.jsonl", work / "so_far.json"
    if not prompts.exists():
        write_prompts(prompts, count)
    past = json.loads(so_far.read_text()) if so_far.exists() else {"peak": 0, "seconds": 0.0, "processes": 0}
    server = StubProcess(tokenizer) if wire else None
    arguments = {
        "prompts": str(prompts),
        "rows": str(work / "million"),
        "tokenizer": None,
        "urls": [server.url if server else "http://inside"],
        "limit": 8,
        "timeout": 60.0,
        "samples": 1,
        "every": 5000,
    }
    started = time.monotonic()
    inside = INSIDE.format(tests=str(TESTS / "capture"), tokenizer=str(tokenizer))
    process = start(arguments, "" if wire else inside)
    peak, watched = past["peak"], psutil.Process(process.pid)
    while process.poll() is None:
        try:
            memory = watched.memory_info()
            peak = max(peak, memory.rss - memory.shared)  # anonymous: what is mapped from files is not counted
        except psutil.NoSuchProcess:
            break
        if time.monotonic() - started > stop_after:
            process.kill()
            process.wait()
        time.sleep(0.2)
    if server:
        server.kill()
    seconds = past["seconds"] + time.monotonic() - started
    so_far.write_text(json.dumps({"peak": peak, "seconds": seconds, "processes": past["processes"] + 1}))
    stored = count_rows(work / "million")
    return {
        "prompts": count,
        "stub": "behind a socket" if wire else "inside the process",
        "rows": stored,
        "exit": None if process.returncode == -signal.SIGKILL else process.returncode,
        "processes": past["processes"] + 1,
        "peak_anonymous_mb": round(peak / 1e6, 1),
        "seconds": round(seconds),
        "rows_per_second": round(stored / seconds),
    }


def kept_rows() -> list[dict[str, Any]]:
    """The parts of the last result: `--prompts 0` or `--million 0` measures the other one anew."""
    path = RESULTS / "faults_capture.json"
    return list(json.loads(path.read_text())["rows"]) if path.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--million", type=int, default=1_000_000)
    parser.add_argument("--wire", action="store_true")
    parser.add_argument("--work", type=Path, help="folder to go on in (the second part); none = a temporary one")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds (the second part)")
    given = parser.parse_args()
    parts = {r["part"]: r for r in kept_rows()}
    with tempfile.TemporaryDirectory() as tmp:
        work = given.work or Path(tmp)
        work.mkdir(parents=True, exist_ok=True)
        tokenizer = work / "tokenizer"
        if not tokenizer.exists():
            write_byte_tokenizer(tokenizer)
        if given.prompts:
            parts["faults"] = {"part": "faults", **faults(work, tokenizer, given.prompts, given.kills)}
            print(json.dumps(parts["faults"]), flush=True)
        if given.million:
            found = million(work, tokenizer, given.million, given.wire, given.stop_after)
            print(json.dumps(found), flush=True)
            if found["exit"] is None:
                raise SystemExit(f"killed after {given.stop_after:.0f} s; the same call goes on")
            parts["million"] = {"part": "million", **found}
    if "faults" not in parts:
        raise SystemExit("measure the faults too: nothing was written")
    first, second = parts["faults"], parts.get("million")
    memory = f"; {second['prompts']:,} prompts in {second['peak_anonymous_mb']:.0f} MB (limit 500)" if second else ""
    path = write(
        "faults_capture",
        claim="every (prompt, sample) is stored exactly once with its own ids, whatever fails" + memory,
        ours=first["right"],
        theirs=first["units"],
        unit="units stored exactly once and equal to the stub's answer",
        rows=list(parts.values()),
    )
    print(path.name)
    held = first["right"] == first["units"] and not (first["foreign"] or first["doubled"] or first["missing"])
    killed = first["capture killed"] >= 20 and first["servers killed"] >= 2 and not first["closed parts changed"]
    small = second is None or (second["rows"] == second["prompts"] >= 1_000_000 and second["peak_anonymous_mb"] <= 500)
    raise SystemExit(0 if held and killed and small else 1)


if __name__ == "__main__":
    main()
