"""Runs in the engine's own interpreter, with draftsmith's plugin on its path: the aux states that the runner really gets
from a target's class for one request, and the tokens that it answers.

    python states_side.py CASE…

CASE is a folder with target/, drafter-eagle3/ and case.json {"prompt": [ids], "max_tokens", "plain": bool}. Written:
out.safetensors with "aux" [T, A, G] of the prompt and out.json {"tokens", "class", "owned"}; or out.json {"error"}. Every
case runs in a forked child, so that the engine is imported once.
"""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


def work(case):
    import torch
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams

    given = json.loads((case / "case.json").read_text())
    spec = {"model": str(case / "drafter-eagle3"), "method": "eagle3", "num_speculative_tokens": 3}
    llm = LLM(
        model=str(case / "target"), skip_tokenizer_init=True, enforce_eager=given.get("eager", True), dtype="float32",
        max_model_len=256, enable_prefix_caching=False, seed=0, disable_log_stats=False,
        speculative_config=None if given.get("plain") else spec, **given.get("args", {}),
    )  # fmt: skip
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    forward, caught = runner._model_forward, []

    def watched(*args, **kwargs):
        out = forward(*args, **kwargs)
        if isinstance(out, tuple):
            caught.append(torch.stack([a.clone() for a in out[1]], dim=1))
        return out

    runner._model_forward = watched
    sampling = SamplingParams(temperature=0, max_tokens=given["max_tokens"], ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": given["prompt"]}], sampling, use_tqdm=False)
    if caught:
        save_file({"aux": caught[0][: len(given["prompt"])].float().contiguous()}, case / "out.safetensors")
    model = runner.get_model()
    counters = {
        m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode") and hasattr(m, "value")
    }
    return {
        "tokens": list(answers[0].outputs[0].token_ids),
        "class": type(model).__name__,
        "owned": any("SupportsEagle3" in c.__name__ for c in type(model).__mro__),
        "counters": counters,
    }


def main():
    import vllm.v1.engine.llm_engine  # noqa: F401 (paid once, before the forks)
    from vllm import LLM  # noqa: F401

    for case in map(Path, sys.argv[1:]):
        pid = os.fork()
        if pid == 0:
            log = os.open(case / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                out = work(case)
            except BaseException:
                out = {"error": traceback.format_exc()[-3000:]}
            (case / "out.json").write_text(json.dumps(out))
            os._exit(0)
        os.waitpid(pid, 0)


main()
