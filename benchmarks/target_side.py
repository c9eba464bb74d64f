"""Runs inside an engine's own interpreter with draftsmith's plugin on its path: jobs of target_table.py, each in a forked
child, so that the engine is imported once.

    ENGINE_PYTHON benchmarks/target_side.py JOBS.jsonl SECONDS

A job: {"kind": "capture" | "serve", "out": file that gets the answer, "target", …}. Jobs whose answer is there
are left out; no new one is begun after SECONDS.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
LIMIT, WORKERS = 240, 2


def engine(job, **more):
    from vllm import LLM

    if job["dtype"] != "float32":  # a GPU, which two jobs share
        more["gpu_memory_utilization"] = 0.3
    return LLM(
        model=job["target"], skip_tokenizer_init=True, enforce_eager=True, dtype=job["dtype"], max_model_len=256,
        enable_prefix_caching=False, seed=0, disable_log_stats=False, max_num_seqs=8, max_num_batched_tokens=512,
        **job.get("args", {}), **more,
    )  # fmt: skip


def ask(llm, prompts, max_tokens, extra=None):
    from vllm import SamplingParams

    sampling = [
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=e)
        for e in (extra or [None] * len(prompts))
    ]
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [list(a.outputs[0].token_ids) for a in answers]


def model_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def about(model):
    owned = any(c.__name__ == "SupportsEagle3" for c in type(model).__mro__)
    return {"class": type(model).__name__, "module": type(model).__module__, "interface": "own" if owned else "plugin"}


def capture(job):
    """Greedy answers of the plain engine, and their aux states by the plugin's tap."""
    os.environ["DRAFTSMITH_VLLM_STATES"] = json.dumps({"folder": job["states"], "layers": job["layers"]})
    llm = engine(job)
    names = [
        {"draftsmith_states": f"row{i}", "draftsmith_from": 0, "draftsmith_argmax": 0}
        for i in range(len(job["prompts"]))
    ]
    tokens = ask(llm, job["prompts"], job["max_tokens"], names)
    ask(llm, job["prompts"][:1], 4)  # the tap writes a request's file when the next step begins
    end = time.time() + 20
    while time.time() < end and not all(
        (Path(job["states"]) / f"row{i}.safetensors").is_file() for i in range(len(names))
    ):
        time.sleep(0.1)
    return about(model_of(llm)) | {"tokens": tokens}


def serve(job):
    """The same prompts with the drafter, one request at a time; the engine's counters."""
    llm = engine(job, speculative_config=job["speculative"])
    tokens = [ask(llm, [p], job["max_tokens"])[0] for p in job["prompts"]]
    words = {"num_drafts": "drafts", "num_draft_tokens": "drafted", "num_accepted_tokens": "accepted",
             "num_accepted_tokens_per_pos": "per_position"}  # fmt: skip
    out = about(model_of(llm)) | {"tokens": tokens}
    for metric in llm.get_metrics():
        name = words.get(metric.name.removeprefix("vllm:spec_decode_"))
        if name:
            values = getattr(metric, "values", None)
            out[name] = list(values) if values is not None else metric.value
    return out


def where(e):
    """The deepest line of the engine's own source that the exception passed, and what the first cause says."""
    seen, first = set(), e
    while (first.__cause__ or first.__context__) and id(first) not in seen:
        seen.add(id(first))
        first = first.__cause__ or first.__context__
    frames = [f for f in traceback.extract_tb(first.__traceback__) if "/site-packages/vllm/" in f.filename]
    at = frames[-1] if frames else None
    place = f"vllm/{at.filename.partition('/site-packages/vllm/')[2]}:{at.lineno}" if at else ""
    return {"error": f"{type(first).__name__}: {' '.join(str(first).split())}"[:400], "at": place,
            "line": (at.line or "") if at else ""}  # fmt: skip


def child(job, log):
    signal.alarm(LIMIT)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    try:
        found = {"capture": capture, "serve": serve}[job["kind"]](job)
    except BaseException as e:
        traceback.print_exc()
        found = where(e)
    out = Path(job["out"])
    out.with_suffix(".part").write_text(json.dumps(found))
    out.with_suffix(".part").rename(out)
    os._exit(0)


def main():
    jobs = [json.loads(x) for x in Path(sys.argv[1]).read_text().splitlines()]
    jobs = [j for j in jobs if not Path(j["out"]).is_file()]
    if not jobs:
        return
    began = time.time()
    import vllm.v1.engine.llm_engine  # noqa: F401 (paid once, before the forks)
    from vllm import LLM  # noqa: F401

    running = {}
    while jobs or running:
        while jobs and len(running) < WORKERS and time.time() - began < float(sys.argv[2]):
            job = jobs.pop(0)
            pid = os.fork()
            if pid == 0:
                child(job, Path(job["out"]).with_suffix(".log"))
            running[pid] = job
        if not running:
            return
        pid, status = os.wait()
        job = running.pop(pid)
        if not Path(job["out"]).is_file():
            Path(job["out"]).write_text(json.dumps({"error": f"the process ended with status {status}", "at": ""}))
        print(job["kind"], job["out"].split("/")[-2], round(time.time() - began, 1), flush=True)


main()
