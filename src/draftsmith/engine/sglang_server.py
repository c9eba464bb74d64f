"""SGLang by its own flags: the same server object, another command line.

vLLM's `num_speculative_tokens` K is K steps of one branch there, and K + 1 draft tokens, since SGLang counts the target's
own (arg_groups/speculative_hook.py). Metrics are off unless asked for. The drafter must be in SGLang's dialect
(draftsmith convert --to sglang). Nothing of this has been run here: it is held to SGLang's source.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from draftsmith.engine.flags import wish
from draftsmith.engine.server import Server
from draftsmith.errors import UserError

ARGUMENTS = ("srt/server_args.py",)
FIELDS = "srt/arg_groups/fields"
"""From 0.5.2x on: one file of annotated fields per group; before, literals in server_args.py."""
ALGORITHMS = {"eagle3": "EAGLE3", "ngram": "NGRAM"}


@lru_cache(maxsize=8)
def sglang_flags(package: Path) -> frozenset[str]:
    """All `--flags` of the server in the sglang package folder, as literals and as annotated fields."""
    found: set[str] = set()
    files = [package / a for a in ARGUMENTS] + sorted((package / FIELDS).glob("*.py"))
    for file in files:
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8")
        found |= set(re.findall(r"""["'](--[a-z0-9][a-z0-9-]*)["']""", text))
        for node in ast.walk(ast.parse(text)):
            # `name: A[type, Arg(…)]`: the flag is the field's name (arg_groups/arg_utils.py, _field_to_cli_name).
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(node.annotation, ast.Subscript)
                and ast.unparse(node.annotation.value) == "A"
            ):
                found.add("--" + node.target.id.replace("_", "-"))
    return frozenset(found)


class SglangServer(Server):
    """An SGLang server; everything but its command line and variables is Server's."""

    engine_name = "sglang"

    def known_flags(self) -> frozenset[str]:
        return sglang_flags(self.engine.package)

    def command(self) -> list[str]:
        known = self.known_flags()
        ours = ["--model-path", self.model, "--served-model-name", self.name, "--host", self.host]
        ours += ["--port", str(self.port), "--context-length", str(self.max_model_len), "--dtype", self.dtype]
        ours += wish(known, ["--enable-metrics"]) + wish(known, ["--disable-radix-cache"])
        if self.engine.platform == "cpu":
            ours += ["--device", "cpu"]
        if self.speculative is not None:
            ours += self._speculative(self.speculative, known)
        return [str(self.engine.python or "python3"), "-m", "sglang.launch_server", *ours, *self.args]

    def _speculative(self, spec: dict[str, Any], known: frozenset[str]) -> list[str]:
        method, k = str(spec["method"]), int(spec["num_speculative_tokens"])
        if method not in ALGORITHMS:
            raise UserError(f"no speculative method {method!r} for SGLang", "", f"one of {', '.join(ALGORITHMS)}")
        if known and "--speculative-algorithm" not in known:
            raise UserError(
                f"{self.engine.label} has no --speculative-algorithm",
                "its source names no such flag",
                "use a later release",
            )
        words = ["--speculative-algorithm", ALGORITHMS[method]]
        if method == "ngram":
            return [*words, "--speculative-num-draft-tokens", str(k + 1)]
        words += ["--speculative-draft-model-path", str(spec["model"]), "--speculative-num-steps", str(k)]
        return [*words, "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(k + 1)]

    def environment(self) -> dict[str, str]:
        added = {"PYTHONUNBUFFERED": "1"}
        if Path(self.model).is_dir():
            added |= {"HF_HUB_OFFLINE": "1"}
        return added | self.env


def server_class(name: str) -> type[Server]:
    """The server of an engine by its name."""
    return SglangServer if name == SglangServer.engine_name else Server
