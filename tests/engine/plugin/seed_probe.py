"""Runs under an engine's interpreter: a request with a seed whose prompt is prefilled in parts, and one prefilled at once.

Arguments: model folder. Prints `RESULT {"parts": [ids], "whole": [ids]}`; dies where the engine has the fault.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=256,
        max_num_seqs=2, max_num_batched_tokens=64, enable_prefix_caching=False,
    )  # fmt: skip
    params = SamplingParams(temperature=2.0, max_tokens=24, ignore_eos=True, detokenize=False, seed=7)
    found = {}
    for name, length in (("whole", 60), ("parts", 188)):  # the same last token, and a model that looks at it alone
        prompt = [(n - length + 60) % 126 for n in range(length)]
        found[name] = list(llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids)
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
