"""A drafter on one GPU: what a small real target gains (or loses), and what a large one would, with the cost model tried.

    python benchmarks/serve_gpu.py --part small --target SMOLLM2 --drafter DRAFTER --engine SITE --gpu 0
    python benchmarks/serve_gpu.py --part large --tokenizer SMOLLM2 --engine SITE --gpu 1

small: SmolLM2 with a trained drafter: acceptance and tokens/s at 1, 8 and 32 at once, temperature 0, by both of vLLM's
model runners, against no drafter and ngram; writes serve_smollm2_h200.
large: a target of 8B's shape and a drafter of its shape, both random and made here, served with vLLM's synthetic
acceptance at given rates: speed without prefill, all requests running; writes serve_8b_h200. bench/cost.py is fitted on
the points of FIT alone and says the others beforehand; writes cost_model_h200.

Servers are started together and measured one at a time. Each result is written as soon as it is there; a part that fails
is reported and left out. --engine: as everywhere, or the folder of an unpacked vLLM that is on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from _figures import RESULTS, write
from _fleet import Fleet
from _serve_points import (
    BAR,
    EVENT_TOKENS,
    FIT,
    LARGE,
    LATE,
    MID,
    Clock,
    best_by_size,
    fit_rows,
    judged,
    measure_large,
    say,
    with_speedups,
)

from draftsmith.bench.forecast import why_slower
from draftsmith.bench.result import assemble
from draftsmith.bench.run import load_sets, run_bench, speculative_of
from draftsmith.bench.ways import Plan, load_way, measure_way
from draftsmith.engine.find import Engine, find_engine
from draftsmith.engine.flags import known_flags, wish
from draftsmith.engine.server import Server
from draftsmith.errors import UserError
from draftsmith.record import write_json
from draftsmith.ui import QuietUi

PORTS = 18000
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
SMALL_WAYS = {
    "drafter": ("drafter", {RUNNER: "1"}),
    "none": ("none", {RUNNER: "1"}),
    "drafter_v1": ("drafter", {RUNNER: "0"}),
    "none_v1": ("none", {RUNNER: "0"}),
    "ngram": ("ngram", {}),  # the engine picks the runner: V2 has no ngram
}
"""name → (kind of drafting, variables), the most wanted first."""


def engine_at(path: str | None) -> Engine:
    """The engine; an unpacked one on PYTHONPATH is run by this very interpreter."""
    found = find_engine(path)
    return found if found.python else replace(found, python=Path(sys.executable))


def say_failed(fleet: Fleet, name: str, error: Exception) -> None:
    """A server that could not be measured, with the end of its log: nothing else of it comes back from a lent machine."""
    say(f"{name}: failed: {type(error).__name__} {error}")
    log = fleet.servers[name].log
    if log.is_file():
        print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]), flush=True)


def give_up(args: argparse.Namespace) -> None:
    """Past the time by far: whatever hangs, what was written stays, and the guards take the servers down."""
    say(f"part {args.part} hangs; given up")
    os._exit(3)


def machine(gpu: int | None) -> str | None:
    """ "one NVIDIA H200", None without a GPU."""
    if gpu is None:
        return None
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", str(gpu)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"one {done.stdout.strip()}"


def make_server(
    args: argparse.Namespace,
    engine: Engine,
    name: str,
    target: Path,
    speculative: dict[str, Any] | None,
    env: dict[str, str],
    flags: list[str],
    timeout: float,
    number: int,
) -> Server:
    """A server of the fleet, not started; number: its place, for a port that no other takes meanwhile."""
    flags = list(flags)
    env = dict(env)
    if args.gpu is not None:
        env |= {"CUDA_VISIBLE_DEVICES": str(args.gpu), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        # Each its own compile cache (they start together) and few compiling processes (so do their neighbours).
        env |= {"VLLM_CACHE_ROOT": str(args.work / "cache" / name), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        # The share is only asked for when it starts; the KV cache's size is given, since measuring it would count
        # what the neighbours take.
        flags += ["--gpu-memory-utilization", "0.12", "--kv-cache-memory-bytes", str(args.kv_bytes)]
    return Server(
        engine,
        target,
        log=args.work / f"engine-{args.part}-{name}.log",
        speculative=speculative,
        max_model_len=args.max_model_len,
        dtype="bfloat16" if args.gpu is not None else "auto",
        args=flags,
        env=env,
        timeout=timeout,
        port=PORTS + 50 * (args.gpu or 0) + number,
        plugin=False,
    )


# -- part small -----------------------------------------------------------------------------------------------


def small_rows(bench: dict[str, Any], k: int) -> list[dict[str, Any]]:
    """One row for each way and concurrency."""
    rows = []
    for way, result in bench["ways"].items():
        kind, env = SMALL_WAYS[way]
        plain = "none_v1" if env.get(RUNNER) == "0" and "none_v1" in bench["ways"] else "none"
        for c, speed in result["speed"].items():
            base = bench["ways"].get(plain, {}).get("speed", {}).get(c, {}).get("tokens_per_second")
            rows.append(
                {
                    "way": kind,
                    "runner": {"1": "V2", "0": "V1", None: "the engine's choice"}[env.get(RUNNER)],
                    "draft_tokens": 0 if kind == "none" else k,
                    "concurrency": int(c),
                    "tokens_per_second": speed["tokens_per_second"],
                    "interval": speed["interval"],
                    "speedup": round(speed["tokens_per_second"] / base, 4) if base else None,
                    "itl_p50": speed["itl"]["p50"],
                    "tokens": speed["tokens"],
                }
                | {
                    key: result["by_concurrency"][c][key]
                    for key in ("tokens_per_target_step", "acceptance_length", "acceptance_per_position", "drafts")
                }
            )
    return rows


def write_small(args: argparse.Namespace, bench: dict[str, Any], engine: Engine) -> None:
    rows = small_rows(bench, args.k)
    found = {(r["way"], r["runner"], r["concurrency"]): r for r in rows}
    ours = [r for r in rows if r["way"] == "drafter"]
    told = ", ".join(f"{r['speedup']:.2f}× at {r['concurrency']} ({r['runner']})" for r in ours if r["speedup"])
    every = [r["speedup"] for r in ours if r["speedup"]]
    ends = "; a target this small loses by it on a GPU" if every and max(every) < 1 else ""
    if {"drafter", "none"} <= set(bench["ways"]):
        evidence, advice = why_slower(bench)
        rows.append({"way": "what diagnose says of it", "evidence": evidence, "advice": advice})
    top = bench["ways"].get("drafter") or bench["ways"].get("drafter_v1") or {}
    lossless = bench.get("losslessness") or {}
    said = f"; {lossless['equal']} of {lossless['compared']} greedy answers equal" if lossless else ""
    ones = [found.get((w, "V2", 1), {}).get("tokens_per_second") for w in ("drafter", "none")]
    write(
        args.name or "serve_smollm2_h200",
        claim=f"SmolLM2-135M with a trained drafter: {top.get('tokens_per_target_step')} tokens per target step, "
        f"per position {top.get('acceptance_per_position')}; its speed is {told} of that of no drafter{said}{ends}",
        ours=ones[0],
        theirs=ones[1],
        unit="tokens/s one at a time, V2 runner, with and without the drafter",
        rows=rows,
        engine_version=engine.version,
        machine=machine(args.gpu),
        made_from=args.commit,
        out=args.out,
    )
    say(f"written: {args.name or 'serve_smollm2_h200'}, {len(rows)} rows")


def small(args: argparse.Namespace, engine: Engine, clock: Clock) -> None:
    """Part small."""
    # One set: the pass at the highest concurrency takes set by set, and each would end with few at once.
    prompts = [p for some in load_sets(args.prompts).values() for p in some]
    plan = Plan(
        {"all": prompts},
        args.concurrency or [32, 8, 1],
        args.max_tokens or 128,
        single_max_tokens=args.max_tokens or 128,
        repeats=args.repeats,
    )
    known = known_flags(engine.package)
    servers = {}
    for name in args.ways or list(SMALL_WAYS):
        kind, env = SMALL_WAYS[name]
        flags = ["--max-num-seqs", str(max(plan.concurrency))]
        if kind == "none":
            flags += wish(known, ["--logprobs-mode", "raw_logits"])
        speculative = speculative_of(kind, args.drafter, args.k)
        servers[name] = make_server(
            args, engine, name, args.target, speculative, env, flags, min(args.start, clock.left - 30), len(servers)
        )
    ui = QuietUi()
    home = args.work / "small"
    about = {"name": engine.name, "version": engine.version, "platform": "cuda" if args.gpu is not None else "cpu"}
    with Fleet(servers, args.at_once) as fleet:
        fleet.start(*servers)
        fleet.settle(min(args.start, clock.left - 60))
        done = []
        for name in servers:
            if clock.left < 20:
                say(f"{name}: left out for want of time")
                continue
            say(f"{name}: measuring, {clock.left:.0f} s left")
            try:
                found = measure_way(lambda way: fleet.open(way, clock.left - 10), name, plan, home, ui)
                told = ", ".join(f"{p.tokens / p.seconds:.0f} ({n})" for n, p in found.passes.items())
                say(f"{name}: tokens/s {told}")
                done.append(name)
            except Exception as e:
                say_failed(fleet, name, e)
                continue
            if "drafter" in done:
                ways = {n: m for n in done if (m := load_way(home, n, plan))}
                write_small(args, assemble(plan, ways, None, about), engine)
        if {"drafter", "none"} <= set(done) and clock.left > 40:
            try:
                bench = run_bench(plan, done, lambda way: fleet.open(way, clock.left - 10), home, about, ui)
                write_small(args, bench, engine)
            except Exception as e:
                say(f"losslessness was not judged: {e}")


# -- part large -----------------------------------------------------------------------------------------------


def write_large(args: argparse.Namespace, rows: list[dict[str, Any]], engine: Engine) -> None:
    rows = with_speedups(rows)
    about: dict[str, Any] = {
        "engine_version": engine.version,
        "machine": machine(args.gpu),
        "made_from": args.commit,
        "out": args.out,
    }
    known = {(r["config"], r["concurrency"]): r for r in rows}
    told = ", ".join(
        f"{r['speedup']:.2f}× at {r['concurrency']}" for r in rows if r["config"] == "k3" and "speedup" in r
    )
    least = min(r["concurrency"] for r in rows)
    write(
        (args.name or "serve_8b_h200"),
        claim=f"a random target of 8B's shape with a drafter of its shape at synthetic acceptance, 3 draft tokens, "
        f"{1 + sum(MID[:3]):.2f} tokens per step: {told} at once; all requests running, prefill left out",
        ours=known.get(("k3", least), {}).get("tokens_per_second"),
        theirs=known.get(("none", least), {}).get("tokens_per_second"),
        unit=f"tokens/s at {least} at once, with and without the drafter",
        rows=rows,
        **about,
    )
    say(f"written: {args.name or 'serve_8b_h200'}, {len(rows)} rows")
    try:
        model = fit_rows(rows)
    except UserError as e:
        say(f"no cost model yet: {e.what}")
        return
    told_rows = [r for r in judged(rows, model) if not r["fitted"]]
    held = [r for r in told_rows if abs(r["error"]) <= BAR and abs(r.get("speedup_error", 0.0)) <= BAR]
    worst = max((abs(r["error"]) for r in told_rows), default=0.0)
    worst_speedup = max((abs(r["speedup_error"]) for r in told_rows if "speedup_error" in r), default=0.0)
    points = "; ".join(f"{n} at {', '.join(map(str, c))}" for n, c in FIT.items())
    write(
        "cost_model" + (f"_{args.name}" if args.name else "_h200"),
        claim=f"the cost model, fitted on {model.points} points ({points}), predicts tokens/s and speed-up of "
        f"{len(held)} of {len(told_rows)} others within {BAR:.0%}; largest error {worst:.1%} of tokens/s, {worst_speedup:.1%} of speed-up",
        ours=len(held),
        theirs=len(told_rows),
        unit=f"points not fitted that are predicted within {BAR:.0%}",
        rows=[{"model": model.as_dict(), "best_draft_tokens": best_by_size(rows, model)}, *judged(rows, model)],
        **about,
    )
    say(f"cost model: {len(held)} of {len(told_rows)} within {BAR:.0%}, worst {worst:.3f} / {worst_speedup:.3f}")


def make_pair(args: argparse.Namespace) -> Path:
    """The random pair's folder; made in a process of its own, so that its memory on the GPU is free again."""
    folder: Path = args.pair or args.work / f"pair-{args.shape}"
    if not (folder / "target" / "config.json").is_file():
        say(f"making the random pair of shape {args.shape}")
        started = time.monotonic()
        words = ["--out", str(folder), "--shape", args.shape, "--tokenizer", str(args.tokenizer or args.target)]
        words += ["--device", f"cuda:{args.gpu}" if args.gpu is not None else "cpu"]
        subprocess.run([sys.executable, str(Path(__file__).with_name("_random_pair.py")), *words], check=True)
        say(f"made in {time.monotonic() - started:.0f} s")
    return folder


def large(args: argparse.Namespace, engine: Engine, clock: Clock) -> None:
    """Part large."""
    pair = make_pair(args)
    sizes = args.concurrency or [1, 2, 8, 32, 64]
    names = args.ways or list(LARGE)
    known = known_flags(engine.package)
    servers = {}
    for name in names:
        k, rates = LARGE[name]
        speculative: dict[str, Any] | None = None
        if k:
            speculative = speculative_of("drafter", pair / "drafter", k) or {}
            if not args.real_acceptance:
                speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates)}
        flags = ["--max-num-seqs", str(max(sizes)), "--max-num-batched-tokens", "4096"]
        flags += wish(known, ["--stream-interval", str(EVENT_TOKENS)])
        env = {RUNNER: "1"} if args.gpu is not None else {}
        servers[name] = make_server(
            args, engine, name, pair / "target", speculative, env, flags, min(args.start, clock.left - 30), len(servers)
        )
    rows: list[dict[str, Any]] = []
    with Fleet(servers, args.at_once) as fleet:
        for group in ([n for n in names if n not in LATE], [n for n in names if n in LATE]):
            if clock.left < 60:
                say(f"left out for want of time: {' '.join(group)}")
                break
            fleet.start(*group)
            fleet.settle(min(args.start, clock.left - 15))
            for name in group:
                large_server(args, fleet, name, clock, sizes, rows)
                write_json(args.work / "large-rows.json", rows)
                if any(r["draft_tokens"] for r in rows):
                    write_large(args, rows, engine)
            fleet.stop(*group)


def large_server(
    args: argparse.Namespace, fleet: Fleet, name: str, clock: Clock, sizes: list[int], rows: list[dict[str, Any]]
) -> None:
    """Measure one server; a failure is told and costs no more than its own points."""
    if clock.left < 25:
        say(f"{name}: left out for want of time")
        return
    try:
        with fleet.open(name, clock.left - 15) as opened:
            say(f"{name}: measuring, {clock.left:.0f} s left, ready in {opened.info['ready_seconds']} s")
            measure_large(name, opened, clock, sizes, args.max_tokens or 384, rows)
    except Exception as e:
        say_failed(fleet, name, e)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--part", choices=("small", "large"), required=True)
    p.add_argument("--target", type=Path, help="folder of the real target (small); its tokenizer serves large too")
    p.add_argument("--drafter", type=Path, help="folder of its drafter (small)")
    p.add_argument("--tokenizer", type=Path, help="folder whose tokenizer the random target borrows")
    p.add_argument("--pair", type=Path, help="folder of the random pair; made there if it is not")
    p.add_argument("--engine", help="environment of vLLM, or the folder of an unpacked one")
    p.add_argument("--gpu", type=int, help="number of the GPU; none = a CPU engine, for trying the script")
    p.add_argument("--seconds", type=float, default=420, help="time in all, starts of the engines included")
    p.add_argument("--start", type=float, default=200, help="seconds at most until the servers are ready")
    p.add_argument("--prompts", nargs="+", default=["mt_bench:40", "gsm8k:28", "humaneval:28"])
    p.add_argument("--k", type=int, default=3, help="draft tokens (small)")
    p.add_argument("--concurrency", type=int, nargs="+")
    p.add_argument("--max-tokens", type=int)
    p.add_argument("--repeats", type=int, default=2, help="measure each pass so often (small)")
    p.add_argument("--ways", nargs="+", help="only these servers")
    p.add_argument("--at-once", type=int, default=8, help="servers starting at the same time")
    p.add_argument("--shape", default="8b")
    p.add_argument("--max-model-len", type=int, default=1024)
    p.add_argument("--kv-bytes", type=int, default=6 * 1024**3, help="KV cache of each server on the GPU")
    p.add_argument("--real-acceptance", action="store_true", help="without synthetic acceptance (large)")
    p.add_argument("--work", type=Path, default=Path("runs/serve_gpu"), help="logs, caches and passes")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    p.add_argument("--name", help="name of the result, in place of the real one: for trials")
    p.add_argument("--commit", help="commit to name; none = git's")
    args = p.parse_args()
    args.work = args.work.absolute()
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    clock = Clock(args.seconds)
    watch = threading.Timer(args.seconds + 15, give_up, [args])
    watch.daemon = True
    watch.start()
    engine = engine_at(args.engine)
    say(f"{engine.label}, part {args.part}, {machine(args.gpu) or 'CPU'}")
    try:
        (small if args.part == "small" else large)(args, engine, clock)
    except (UserError, OSError, subprocess.CalledProcessError, KeyError, ValueError) as e:
        traceback.print_exc()
        say(f"part {args.part} failed: {e}")
        return 1
    say(f"done, {clock.left:.0f} s left")
    print(json.dumps({"part": args.part, "left": round(clock.left)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
