"""Runs inside an engine's own interpreter: many target/drafter pairs, each in a forked child, imports paid once.

    ENGINE_PYTHON benchmarks/engine_probe.py JOBS.jsonl RESULTS.jsonl SECONDS [LOCK]

A job: {"name", "model", "speculative": {…} or null, "args": {…}, "prompt": [ids], "max_tokens"}. A result says how far
the engine came (config, load, profile, request, done), its last error, and the speculation counters. Jobs that have a
result already are left out; no new one is begun after SECONDS. With LOCK (a file), work is done in turns of SECONDS
under that file's lock until all jobs are done: for machines on which several heavy programs take turns.

Three things are made cheaper than in a server, none of which changes what is loaded or computed: the modules that a
child imported are imported by the parent before the next fork (their names stay in modules.json beside the results), a
model class is inspected in the child itself and not in a further process, and small functions are not compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_COMPILE_DISABLE": "1",
}
LIMIT, WORKERS = 120, 3
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "per_position",
}


def phase_of(text: str) -> str:
    """Where in the engine's life a traceback was raised."""
    if "create_engine_config" in text or "create_speculative_config" in text:
        return "config"
    if "determine_available_memory" in text or "profile_run" in text or "_dummy_run" in text:
        return "profile"
    return "load"


def work(job: dict) -> dict:
    """One pair, in this process."""
    from vllm import LLM, SamplingParams

    # Small batches: the profile run computes a whole one.
    args = {"max_num_seqs": 4, "max_num_batched_tokens": 512} | (job.get("args") or {})
    if job.get("speculative"):
        args["speculative_config"] = job["speculative"]
    try:
        llm = LLM(
            model=job["model"], skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
            disable_log_stats=False, enable_prefix_caching=False, seed=0, **args,
        )  # fmt: skip
    except BaseException as e:
        text = traceback.format_exc()
        return {"reached": phase_of(text), "error": f"{type(e).__name__}: {deepest(e)}"[:600]}
    out: dict = {"reached": "request", "error": None}
    try:
        sampling = SamplingParams(
            temperature=0, max_tokens=job.get("max_tokens", 48), ignore_eos=True, detokenize=False
        )
        answers = llm.generate([{"prompt_token_ids": job["prompt"]}], sampling, use_tqdm=False)
        out |= {"reached": "done", "tokens": list(answers[0].outputs[0].token_ids)}
    except BaseException as e:
        return out | {"error": f"{type(e).__name__}: {deepest(e)}"[:600]}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            value = getattr(metric, "values", None)
            out[COUNTERS[metric.name]] = list(value) if value is not None else metric.value
    return out


def inspect_here() -> None:
    """Model classes are inspected in this process (it is a forked child already), not in one more."""
    registry = sys.modules.get("vllm.model_executor.models.registry")
    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda function: function()


class Preloaded:
    """Names of modules that children needed; imported here, so that later children are forked with them."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.names: list[str] = json.loads(file.read_text()) if file.exists() else []
        self.take([])

    def take(self, names: list[str]) -> None:
        new = [n for n in names if n not in self.names]
        self.names += new
        for name in new or self.names:
            with contextlib.suppress(Exception):
                if name not in sys.modules:
                    import_module(name)
        if new:
            self.file.write_text(json.dumps(self.names))


def new_modules(before: set[str]) -> list[str]:
    """Modules that a job brought in, in the order of their import."""
    return [n for n, m in list(sys.modules.items()) if n not in before and getattr(m, "__spec__", None) is not None]


def die_with_parent() -> None:
    """No orphan where the process that started this one is stopped (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def deepest(e: BaseException) -> str:
    """The message of the first cause in the chain."""
    seen = set()
    while (e.__cause__ or e.__context__) and id(e) not in seen:
        seen.add(id(e))
        e = e.__cause__ or e.__context__  # type: ignore[assignment]
    return " ".join(str(e).split())


class Child:
    """`work` in a forked process that may crash or hang without harm."""

    def __init__(self, job: dict, log: Path) -> None:
        self.name, self.started, self.chunks, self.log = job["name"], time.time(), [], log
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.reader)
            die_with_parent()
            os.setsid()
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            try:
                before = set(sys.modules)
                result = work(job)
                with os.fdopen(writer, "wb") as pipe:
                    pipe.write(json.dumps(result | {"modules": new_modules(before)}).encode())
            finally:
                os._exit(0)
        os.close(writer)

    def read(self) -> bool:
        """Take what it wrote; True when it has closed its end."""
        chunk = os.read(self.reader, 65536)
        self.chunks.append(chunk)
        return not chunk

    def end(self, hung: bool) -> dict:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.reader)
        try:
            result = json.loads(b"".join(self.chunks))
        except ValueError:
            result = {"reached": "crash", "error": f"process ended with status {status}"}
            if hung:
                result = {"reached": "hang", "error": f"no end after {LIMIT} s"}
        return {"name": self.name, "seconds": round(time.time() - self.started, 1), **result}


def run_all(jobs: list[dict], results_file: Path, seconds: float, preloaded: Preloaded) -> None:
    """At most WORKERS children at once (one until it is known what they import); none is begun after `seconds`."""
    began, running = time.time(), {}
    while jobs or running:
        while jobs and len(running) < (WORKERS if preloaded.names else 1) and time.time() - began < seconds:
            logs = {c.log for c in running.values()}
            log = next(x for i in range(WORKERS) if (x := results_file.with_name(f"{i}.log")) not in logs)
            child = Child(jobs[0], log)
            running[child.reader] = child
            jobs.pop(0)
        if not running:
            return
        ready, _, _ = select.select(list(running), [], [], 1.0)
        ended = [(running[r], False) for r in ready if running[r].read()]
        ended += [(c, True) for c in running.values() if time.time() - c.started > LIMIT]
        for child, hung in ended:
            if running.pop(child.reader, None) is None:
                continue
            result = child.end(hung)
            preloaded.take(result.pop("modules", []))
            with results_file.open("a") as f:
                f.write(json.dumps(result) + "\n")
            print(json.dumps({k: x for k, x in result.items() if k != "tokens"}), flush=True)


def main() -> None:
    die_with_parent()
    jobs_file, results_file, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    mine = results_file.with_name("running.lock").open("a")
    try:
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another run works on {results_file.name} already; nothing done", flush=True)
        return
    done = set()
    if results_file.exists():
        done = {json.loads(x)["name"] for x in results_file.read_text().splitlines() if x.strip()}
    jobs = [j for j in map(json.loads, jobs_file.read_text().splitlines()) if j["name"] not in done]
    if not jobs:
        return
    lock = Path(sys.argv[4]).open("a") if len(sys.argv) > 4 else None  # noqa: SIM115 (held for the process's life)
    if lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    import vllm.model_executor.models.registry
    import vllm.v1.engine.llm_engine  # noqa: F401 (paid once, before the forks)
    from vllm import LLM  # noqa: F401

    inspect_here()
    preloaded = Preloaded(results_file.with_name("modules.json"))
    while True:
        run_all(jobs, results_file, seconds, preloaded)
        if not (lock and jobs):
            return
        fcntl.flock(lock, fcntl.LOCK_UN)
        time.sleep(3)
        fcntl.flock(lock, fcntl.LOCK_EX)


main()
