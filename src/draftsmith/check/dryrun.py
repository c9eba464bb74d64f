"""--dry-run: the engine's own verdict on the configs, in a process of its own environment; no weights are loaded.

The engine is executed here, and only here: EngineArgs(...).create_engine_config() of the interpreter that the user
named, with a time limit, its last error line as the finding.
"""

from __future__ import annotations

import json
import os
import subprocess

from draftsmith.check.types import CheckRow, Context
from draftsmith.errors import UserError

SECONDS = 180
CODE = """
import json, sys
job = json.load(sys.stdin)
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs(**job).create_engine_config()
spec = config.speculative_config
print("DRAFTSMITH " + json.dumps({
    "method": spec.method, "architectures": list(spec.draft_model_config.architectures),
    "v2_runner": getattr(config, "use_v2_model_runner", None), "max_model_len": config.model_config.max_model_len}))
"""


def _job(ctx: Context) -> dict[str, object]:
    o = ctx.options
    speculative: dict[str, object] = {
        "model": str(ctx.drafter_folder),
        "num_speculative_tokens": o.num_speculative_tokens or 3,
    }
    if o.method is not None or "eagle3" not in str(ctx.drafter_folder).lower():
        speculative["method"] = o.method or "eagle3"
    job: dict[str, object] = {
        "model": str(ctx.target_folder),
        "skip_tokenizer_init": True,
        "speculative_config": speculative,
    }
    if o.max_model_len:
        job["max_model_len"] = o.max_model_len
    if o.tensor_parallel > 1:
        job["tensor_parallel_size"] = o.tensor_parallel
    return job


def _row(status: str, found: str, fix: str = "") -> CheckRow:
    return CheckRow("engine.dry_run", "engine", status, found, [], fix)  # type: ignore[arg-type]


def last_error(text: str) -> str:
    """The line that says what went wrong: pydantic's detail, else the last line that names an error."""
    lines = [x.strip() for x in text.splitlines() if x.strip()]
    for i, line in enumerate(lines):
        if "validation error" in line and i + 1 < len(lines):
            return " ".join(lines[i : i + 3])[:400]
    named = [x for x in lines if "Error" in x.split(":", 1)[0] or "Error:" in x]
    return (named or lines or ["no output"])[-1][:400]


def dry_run(ctx: Context) -> CheckRow:
    """One row, engine.dry_run."""
    from draftsmith.engine.find import find_engine

    if ctx.engine_path is None:
        return _row("skip", "no engine given and none found")
    try:
        engine = find_engine(ctx.engine_path)
    except UserError as e:
        return _row("skip", f"the engine can be read but not run: {e.what}")
    if engine.python is None or engine.name != "vllm":
        return _row("skip", "no interpreter beside this source" if engine.python is None else "only vLLM can be asked")
    env = {k: x for k, x in os.environ.items() if not k.startswith("PYTHON")} | ctx.options.env
    env |= {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            [str(engine.python), "-c", CODE], input=json.dumps(_job(ctx)), env=env,
            capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _row("skip", f"the engine's config creation took more than {SECONDS} s")
    except OSError as e:
        return _row("skip", f"{engine.python} does not run: {e}")
    marked = [x for x in done.stdout.splitlines() if x.startswith("DRAFTSMITH ")]
    if done.returncode == 0 and marked:
        said = json.loads(marked[-1].removeprefix("DRAFTSMITH "))
        return _row("pass", "its own config creation succeeds: " + ", ".join(f"{k} {x}" for k, x in said.items()))
    return _row(
        "fail", f"its own config creation fails: {last_error(done.stderr)}", "draftsmith explain, on the whole log"
    )
