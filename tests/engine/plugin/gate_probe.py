"""Runs under an engine's interpreter: asks that release's own config classes whether they take each pair.

Arguments: a JSON file with [{"name", "target", "drafter", "args", "env"}]; prints one JSON object per case:
{"name", "taken": bool, "stage": where it ended, "error", "loaded_plugin"}. No weights are read.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def ask(case: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs

    os.environ.update(case.get("env", {}))
    stage = "EngineArgs"
    try:
        args = EngineArgs(
            model=case["target"],
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            speculative_config={"model": case["drafter"], "method": "eagle3", "num_speculative_tokens": 3},
            **case.get("args", {}),
        )
        stage = "create_model_config"
        model_config = args.create_model_config()
        from vllm.config import ParallelConfig

        stage = "create_speculative_config"
        created = args.create_speculative_config(model_config, ParallelConfig())
        return {"taken": created is not None, "stage": stage, "error": ""}
    except Exception as e:  # what the engine says is the result here
        return {"taken": False, "stage": stage, "error": f"{type(e).__name__}: {e}"}


def main() -> None:
    import vllm

    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for case in cases:
        found = ask(case)  # the first one loads the plugins
        loaded = "draftsmith_vllm" in sys.modules
        print("RESULT " + json.dumps({"name": case["name"], "version": vllm.__version__, "plugin": loaded} | found))


if __name__ == "__main__":
    main()
