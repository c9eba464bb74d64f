"""Runs under an engine's interpreter: lets a counting model go on at temperature 0.8 with n-gram speculation.

Arguments: model folder. Prints `RESULT {"tokens": [[…], …]}`.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        enable_prefix_caching=False,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 2,
        },
    )
    prompt = [n % 126 for n in range(140)]
    params = SamplingParams(temperature=0.8, max_tokens=64, ignore_eos=True, detokenize=False, seed=1)
    outputs = llm.generate([{"prompt_token_ids": prompt}] * 4, params)
    print("RESULT " + json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in outputs]}))


if __name__ == "__main__":
    main()
