"""Claim: on a GPU, states are taken at nearly the engine's own speed, and at least as fast as through vLLM's own example.

    python benchmarks/extract_gpu.py --engine SITE --small SMOLLM2 [--seconds 300]

Two targets: a small real one, bound by launches, and random weights of Qwen3-8B's shape (made by the engine itself), whose
states are 32 kB a token. For each, servers stand side by side and are asked in turns: plain; tapped by our plugin on the
engine's default runner, and on its older one; and vLLM's ExampleHiddenStatesConnector. Writes, as soon as there are
figures: extract_gpu_two_pass_TARGET (rows through to the store, against plain prefill), extract_gpu_example_TARGET (rows
as tensors in this process, ids compared, against the example's; with the ways' states against each other) and
extract_gpu_one_pass_TARGET (answers with their states stored, against plain generation).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import _figures
from _states_fleet import (
    Fleet,
    Limits,
    Side,
    answers,
    answers_handed_over,
    answers_kept,
    answers_of_example,
    best,
    compare,
    example_rows,
    in_turns,
    plain_prefill,
    write_shape,
)
from _two_engines import lengths, random_rows

from draftsmith.contract import Contract
from draftsmith.engine.find import Engine, find_engine
from draftsmith.target.config import default_aux_layers, target_facts

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
RAM_AHEAD = 32 << 30
"""Bytes of the RAM disk that are written and freed before anything is timed: the most that one turn stores."""
WARM = 16
"""Rows, or tokens of an answer, of the turn that only warms up."""
SHARE = {"small": 0.06, "8b": 0.17}
"""Of the GPU's memory, that must be free when a server starts; its KV cache is given in bytes."""
KV_GIB = {"small": 2, "8b": 6}


def engine_at(path: str | None) -> Engine:
    """As find_engine; an unpacked one is run by this interpreter (it must be on PYTHONPATH)."""
    engine = find_engine(path)
    return engine if engine.python else replace(engine, python=Path(sys.executable))


class Case:
    """One target with its servers and what they are asked."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace, deadline: Callable[[], float]) -> None:
        self.name, self.folder, self.args, self.left = name, folder, args, deadline
        self.facts = target_facts(folder)
        self.contract = Contract(
            target=self.facts, aux_layer_ids=default_aux_layers(self.facts.num_layers), final_state="pre_norm"
        )
        big = name == "8b"
        count = args.rows or (640 if big else 4096)
        self.rows = random_rows(lengths(count, args.shortest, args.longest), self.facts.vocab_size)
        self.prompts = random_rows(lengths(args.prompts or (672 if big else 1024), 100, 500, 1), self.facts.vocab_size)
        self.sizes = lengths(len(self.prompts), args.answer // 2, args.answer * 3 // 2, 2)
        self.at_once = args.at_once or (64 if big else 128)
        self.agreement: list[Any] = []
        self.failed: list[str] = []
        self.note = {
            "target": name,
            "hidden": self.facts.hidden_size,
            "layers": self.facts.num_layers,
            "bytes_per_token": 2 * self.facts.hidden_size * (len(self.contract.aux_layer_ids or []) + 1),
        }

    def start(self, fleet: Fleet, work: Path) -> None:
        extra: list[str] = []
        if not self.args.cpu:
            extra += ["--kv-cache-memory-bytes", str(KV_GIB[self.name] << 30), "--max-num-seqs", "256"]
            extra += ["--gpu-memory-utilization", str(SHARE[self.name])]
        if self.name == "8b":
            extra += ["--load-format", "dummy"]
        limits = Limits(max(self.args.longest + 1, 501 + self.args.answer * 3 // 2), self.args.dtype, extra)
        fleet.add(self.name, self.folder, self.contract, limits, work, self.args.servers)

    def measure(self, fleet: Fleet, store: Path) -> None:
        """The figures, each of which may fail alone."""
        for part in (self.agree, self.two_pass, self.one_pass):
            if self.left() < 10:
                print(f"{self.name}: no time left for {part.__name__}", flush=True)
                return
            try:
                part(fleet, store)
            except Exception:
                self.failed.append(part.__name__)
                print(f"{self.name}: {part.__name__} failed:\n{traceback.format_exc()}", flush=True)

    def write(self, figure: str, claim: str, ours: Any, theirs: Any, rows: list[Any], unit: str = "tokens/s") -> None:
        path = _figures.write(
            f"extract_gpu_{figure}_{self.name}",
            claim=claim,
            ours=ours,
            theirs=theirs,
            unit=unit,
            rows=rows,
            engine_version=self.args.version,
            machine=self.args.machine,
            out=self.args.out,
        )
        made = json.loads(path.read_text())
        print(f"== {path.name}: {made['ours']} against {made['theirs']}: {made['ratio']}", flush=True)

    def agree(self, fleet: Fleet, store: Path) -> None:
        """Layers' relative L2 between the ways on four rows: the older runner's tap is the base."""
        if len(self.args.servers) < 3:
            return
        self.agreement = compare(fleet.of(self.name), self.rows[:4], self.facts, self.folder)
        print(json.dumps(self.agreement), flush=True)

    def two_pass(self, fleet: Fleet, store: Path) -> None:
        asked, args = fleet.of(self.name), self.args

        def rows(warm: bool) -> list[list[int]]:
            return self.rows[:WARM] if warm else self.rows

        sides: dict[str, Side] = {}
        if "plain" in asked:
            sides["plain"] = lambda w: plain_prefill(asked["plain"], rows(w))
        for name in ("tapped", "tapped-v1"):
            if name in asked:
                sides[f"{name}, stored"] = lambda w, a=asked[name]: a.store(rows(w), store)
        main = next((n for n in ("tapped", "tapped-v1") if n in asked), None)
        if main is not None and not args.stored_only:
            sides[f"{main}, handed over"] = lambda w: asked[main].hand_over(rows(w))
            sides[f"{main}, stored with argmax"] = lambda w: asked[main].store(rows(w), store, argmax=True)
        if "example" in asked:
            sides["example, handed over"] = lambda w: example_rows(asked["example"], rows(w))
        note = {**self.note, "rows": len(self.rows), "tokens": sum(map(len, self.rows)), "store": str(args.where)}

        def write(found: dict[str, list[float]]) -> None:
            made = [{"side": k, "tokens_per_second": v} for k, v in found.items()] + [note]
            self.write(
                "two_pass",
                "two-pass extraction, stored and closed, against plain prefill of the same rows (medians)",
                best(found, "tapped, stored", "tapped-v1, stored"),
                best(found, "plain"),
                made,
            )
            if "example" in asked:
                self.write(
                    "example",
                    "rows to tensors with ids compared: ours against vLLM's example connector (medians)",
                    best(found, "tapped, handed over", "tapped-v1, handed over"),
                    best(found, "example, handed over"),
                    [*made, *self.agreement],
                )

        in_turns(self.wanted(sides), args.rounds, self.left, 0.7, write)

    def wanted(self, sides: dict[str, Side]) -> dict[str, Side]:
        return {k: v for k, v in sides.items() if k not in self.args.without}

    def one_pass(self, fleet: Fleet, store: Path) -> None:
        asked, args, at_once = fleet.of(self.name), self.args, self.at_once

        def given(warm: bool) -> tuple[list[list[int]], list[int], int]:
            return (self.prompts[:at_once], [WARM] * at_once, at_once) if warm else (self.prompts, self.sizes, at_once)

        sides: dict[str, Side] = {}
        if "plain" in asked:
            sides["plain"] = lambda w: answers(asked["plain"], *given(w))
        for name in ("tapped", "tapped-v1"):
            if name in asked:
                sides[f"{name}, stored"] = lambda w, a=asked[name]: answers_kept(a, *given(w), store)
        main = next((n for n in ("tapped", "tapped-v1") if n in asked), None)
        if main is not None and not args.stored_only:
            sides[f"{main}, handed over"] = lambda w: answers_handed_over(asked[main], *given(w))
            sides[f"{main}, no states asked for"] = lambda w: answers(asked[main], *given(w))
        if "example" in asked:
            sides["example, handed over"] = lambda w: answers_of_example(asked["example"], *given(w))
        note = {**self.note, "prompts": len(self.prompts), "answers": sum(self.sizes), "at_once": at_once}

        def write(found: dict[str, list[float]]) -> None:
            self.write(
                "one_pass",
                "answers with their states stored and closed against plain generation, answer tokens per second (medians)",
                best(found, "tapped, stored", "tapped-v1, stored"),
                best(found, "plain"),
                [{"side": k, "tokens_per_second": v} for k, v in found.items()] + [note],
            )

        in_turns(self.wanted(sides), args.rounds, self.left, 0.95, write)


def touch(folder: Path, size: int) -> None:
    """Write and free so many bytes there: a virtual machine may get its memory from its host only as it is first used, at
    some 3 GB/s (seen on a lent H200), and the first turns that store would pay for that."""
    block = bytes(64 << 20)

    def write(path: Path) -> None:
        with path.open("wb") as f:
            for _ in range(max(1, size // 4 // len(block))):
                f.write(block)

    paths = [folder / f"touch-{i}" for i in range(4)]
    started = time.monotonic()
    try:
        with ThreadPoolExecutor(len(paths)) as pool:
            list(pool.map(write, paths))
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
    print(f"{size >> 30} GiB of the RAM disk touched in {time.monotonic() - started:.0f} s", flush=True)


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--engine", help="environment of the engine, or the folder of an unpacked one on PYTHONPATH")
    p.add_argument("--small", type=Path, required=True, help="folder of a small target; its tokenizer serves 8b too")
    p.add_argument("--targets", nargs="+", default=["small", "8b"], choices=["small", "8b"])
    p.add_argument("--servers", nargs="+", default=["plain", "tapped", "tapped-v1", "example"])
    p.add_argument("--seconds", type=float, default=300, help="in all, starts included")
    p.add_argument("--start-seconds", type=float, default=170, help="servers that are not ready by then are left out")
    p.add_argument("--rows", type=int)
    p.add_argument("--prompts", type=int)
    p.add_argument("--shortest", type=int, default=900)
    p.add_argument("--longest", type=int, default=2000)
    p.add_argument("--answer", type=int, default=256, help="mean; half to one and a half of it")
    p.add_argument("--at-once", type=int)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--stored-only", action="store_true", help="leave out rows that are only handed over")
    p.add_argument("--without", nargs="+", default=[], help="sides to leave out, by their names in the output")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--cpu", action="store_true", help="for trying the script")
    p.add_argument("--work", type=Path, default=Path("runs/extract_gpu"), help="logs of the engines")
    p.add_argument("--out", type=Path, default=_figures.RESULTS)
    return p.parse_args()


def main() -> None:
    args, started = options(), time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    args.work = args.work.absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    engine = engine_at(args.engine)
    args.version = engine.version
    if not args.cpu:
        import torch

        torch.zeros(1, device="cuda")  # names the machine in the results
    args.machine = _figures.here()
    ram = Path("/dev/shm")
    room = shutil.disk_usage(ram).free if ram.is_dir() else 0
    args.where = "RAM disk" if room > RAM_AHEAD else "disk"
    print(f"{engine.label}, {args.machine}, RAM disk has {room >> 30} GiB, states go to the {args.where}", flush=True)

    def left(until: float = args.seconds) -> float:
        return until - (time.monotonic() - started)

    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="extract-")))
        store = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=ram if room > RAM_AHEAD else args.work)))
        folders = {"small": args.small, "8b": write_shape(QWEN3_8B, args.small, work / "8b")}
        cases = []
        fleet = stack.enter_context(Fleet(engine))
        for i, name in enumerate(args.targets):
            share = 0.45 if i == 0 and len(args.targets) > 1 else 1.0
            begun = [0.0]

            def until(share: float = share, begun: list[float] = begun) -> float:
                # The first target may take its share of what is left once the servers stand.
                if not begun[0]:
                    begun[0] = time.monotonic() - started
                return left(begun[0] + share * (args.seconds - 12 - begun[0]))

            case = Case(name, folders[name], args, until)
            case.start(fleet, args.work)
            cases.append(case)
        if room > RAM_AHEAD and not args.cpu:
            touch(store, RAM_AHEAD)  # while the servers start
        fleet.wait(left(args.start_seconds))
        print(f"servers stand after {time.monotonic() - started:.0f} s", flush=True)
        for case in cases:
            case.measure(fleet, store)
            fleet.stop(case.name)
        print(f"done after {time.monotonic() - started:.0f} s", flush=True)
    if failed := [f"{case.name}: {part}" for case in cases for part in case.failed]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
