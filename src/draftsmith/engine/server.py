"""Launch a vLLM server, follow its log until it is ready, and take it down without remains.

with Server(find_engine(), target, speculative={"method": "eagle3", ...}, log=folder / "engine.log") as server:
    client = EngineClient(server.url, server.name)
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from draftsmith.cpu import multiplies_bf16
from draftsmith.engine.find import Engine
from draftsmith.engine.flags import known_flags, wish
from draftsmith.engine.inject import plugin_env
from draftsmith.engine.process import Guarded, free_port, require_free
from draftsmith.engine.server_death import explain_death
from draftsmith.errors import Exit, UserError
from draftsmith.recipe import EngineSection
from draftsmith.secrets import require_none
from draftsmith.ui import QuietUi, Ui

SERVED_NAME = "target"
"""The name every server of ours is asked by, whatever folder the model lies in."""

STAGES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("config read", re.compile(r"non-default args|Resolved architecture")),
    ("engine core started", re.compile(r"Initializing a V1 LLM engine|Waiting for init message")),
    ("loading the target's weights", re.compile(r"Starting to load model|Loading model from scratch")),
    ("loading the drafter's weights", re.compile(r"Loading drafter model")),
    ("weights loaded", re.compile(r"Loading weights took ([\d.]+ seconds)|Model loading took ([^\n]+)")),
    ("compiling", re.compile(r"torch\.compile takes|Compiling a graph|Capturing CUDA graphs?")),
    ("KV cache", re.compile(r"KV cache size: ([\d,]+ tokens)")),
    ("front end started", re.compile(r"Started server process|Starting vLLM (?:API )?server")),
)
"""What the log says on the way to ready (vLLM 0.10 to 0.33), in our words; a group that matched is shown."""


class Server:
    """One vLLM server as a context manager; `url` and `name` are what a client needs.

    model: folder or hub id. speculative: vLLM's speculative config, None = none (its "method" is required: left out,
    vLLM guesses it from the folder's name). args, env: further flags and variables, laid over ours. kv_gib: KV cache
    on a CPU. port: none = a free one. log: file that gets the engine's output (rewritten). timeout: seconds to ready.
    Prefix caching is off, so that repeated prompts cost what they cost; plugin=False leaves ours out.
    """

    engine_name = "vllm"

    def __init__(
        self,
        engine: Engine,
        model: Path | str,
        *,
        log: Path,
        speculative: Mapping[str, Any] | None = None,
        max_model_len: int = 2048,
        dtype: str = "auto",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        timeout: float = 900.0,
        kv_gib: int = 1,
        name: str = SERVED_NAME,
        plugin: bool = True,
        ui: Ui | None = None,
    ) -> None:
        if engine.name != self.engine_name or engine.python is None:
            raise UserError(
                f"{engine.label} at {engine.site} cannot be launched",
                f"only a {self.engine_name} with an interpreter can" if engine.python else "it has no interpreter",
                "give the environment of a vLLM (--engine PATH), or the endpoint of a running server",
            )
        if speculative is not None and "method" not in speculative:
            raise UserError(
                "the speculative config has no method",
                "vLLM then takes it from the folder's name, and loads an EAGLE-3 drafter as a plain model",
                'put "method": "eagle3" into it',
            )
        require_none(list(args), dict(env or {}), "what the engine is started with")
        self.engine, self.model, self.log, self.name = engine, str(model), log, name
        self.speculative = dict(speculative) if speculative is not None else None
        self.max_model_len, self.dtype = max_model_len, engine_dtype(dtype)
        self.args, self.env = list(args), dict(env or {})
        self.host, self.timeout, self.kv_gib, self.plugin = host, timeout, kv_gib, plugin
        self.ui: Ui = ui or QuietUi()
        self._given_port, self._port = port, port
        self._guarded: Guarded | None = None
        self.stages: list[str] = []
        self.ready_seconds: float | None = None
        self.kv_tokens: int | None = None

    # -- what is launched -------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        if self._port is None:
            self._port = free_port()
        return self._port

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"

    def known_flags(self) -> frozenset[str]:
        """Flags that this release knows."""
        return known_flags(self.engine.package)

    def command(self) -> list[str]:
        """The engine's command line; what a release does not know is left out."""
        known = self.known_flags()
        ours: list[str] = ["--model", self.model, "--served-model-name", self.name]
        ours += ["--host", self.host, "--port", str(self.port)]
        ours += ["--max-model-len", str(self.max_model_len), "--dtype", self.dtype]
        if self.engine.platform == "cpu":
            ours += ["--enforce-eager"]
        ours += wish(known, ["--no-enable-prefix-caching"])
        ours += wish(known, ["--no-enable-log-requests"], ["--disable-log-requests"])
        ours += wish(known, ["--disable-uvicorn-access-log"])
        # Without it the model's generation_config.json fills in what a request leaves open.
        ours += wish(known, ["--generation-config", "vllm"])
        if self.speculative is not None:
            ours += ["--speculative-config", json.dumps(self.speculative)]
        return [str(self.engine.python), "-m", "vllm.entrypoints.openai.api_server", *ours, *self.args]

    def environment(self) -> dict[str, str]:
        """Variables added to the user's own; those given by the user win."""
        # PYTHONSAFEPATH: `python -m` would look for vllm and all it imports in the folder we were called from first.
        added = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
        if Path(self.model).is_dir():
            # Nothing is fetched for a folder; without this a hub that does not answer costs minutes.
            added |= {"HF_HUB_OFFLINE": "1"}
        if self.engine.platform == "cpu":
            added |= cpu_environment(self.engine, self.kv_gib)
        if self.plugin:
            base = dict(os.environ) | self.env
            added |= plugin_env(self.engine.package.parent, base=base, metadata=True)
        return added | self.env

    def shell_command(self) -> str:
        """The plain command for people who launch it themselves."""
        env = [f"{k}={shlex.quote(v)}" for k, v in sorted(self.environment().items())]
        return " \\\n  ".join([" ".join(env), *_pairs(self.command())])

    # -- life -------------------------------------------------------------------------------------------------

    def start(self) -> Server:
        """Launch and wait until /health answers; UserError with the engine's own root line if it dies or is late."""
        if self._given_port is not None:
            require_free(self._given_port, self.host)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        started = time.monotonic()
        self._guarded = self.launch()
        try:
            self._wait(started)
        except BaseException:
            self.stop()
            raise
        self.ready_seconds = round(time.monotonic() - started, 1)
        kv = f", KV cache {self.kv_tokens:,} tokens" if self.kv_tokens else ""
        self.ui.note(f"engine ready in {self.ready_seconds:.0f} s{kv} at {self.url}")
        return self

    def launch(self) -> Guarded:
        """Start the process; overridden for a server on another host."""
        return Guarded(self.command(), dict(os.environ) | self.environment(), self.log)

    def _wait(self, started: float) -> None:
        assert self._guarded is not None
        offset = 0
        with httpx.Client(timeout=5.0) as http:
            while True:
                offset = self._follow(offset, time.monotonic() - started)
                code = self._guarded.exit_code()
                if code is not None:
                    self._follow(offset, time.monotonic() - started)
                    raise self.death(code)
                try:
                    if http.get(self.url + "/health").is_success:
                        self._follow(offset, time.monotonic() - started)
                        return
                except httpx.HTTPError:
                    pass  # not listening yet; the exit code and the clock decide
                if time.monotonic() - started > self.timeout:
                    last = self.stages[-1] if self.stages else "nothing"
                    raise UserError(
                        f"the engine was not ready after {self.timeout:.0f} s (last seen: {last})",
                        "",
                        f"see {self.log}; raise engine.start_timeout for a large model",
                        Exit.NO,
                    )
                time.sleep(0.25)

    def _follow(self, offset: int, seconds: float) -> int:
        """Note the stages in what the log has gained since `offset`; returns the new offset."""
        with self.log.open("rb") as f:
            f.seek(offset)
            raw = f.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        for line in whole.decode(errors="replace").splitlines():
            for title, pattern in STAGES:
                found = pattern.search(line)
                if not found:
                    continue
                detail = next((g for g in found.groups() if g), "")
                if title == "KV cache":
                    self.kv_tokens = int(detail.split()[0].replace(",", ""))
                stage = f"{title}: {detail}" if detail else title
                if stage not in self.stages:
                    self.stages.append(stage)
                    self.ui.note(f"  engine {seconds:4.0f} s  {stage}")
        return offset + len(whole)

    def alive(self) -> bool:
        return self._guarded is not None and self._guarded.exit_code() is None

    def require_alive(self) -> None:
        """UserError with the root line if the engine has died since it was ready."""
        if self._guarded is not None and (code := self._guarded.exit_code()) is not None:
            raise self.death(code)

    def death(self, code: int) -> UserError:
        """The engine's end as one block."""
        return explain_death(self.log, code, self.engine)

    def stop(self) -> None:
        """Graceful stop; returns when no process of the engine is left."""
        if self._guarded is not None:
            self._guarded.stop()
            self._guarded = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve_section(section: EngineSection) -> dict[str, Any]:
    """The recipe's engine section as Server's arguments."""
    return {
        "max_model_len": section.max_model_len,
        "dtype": engine_dtype(section.dtype),
        "args": section.args,
        "env": section.env,
        "timeout": section.start_timeout,
    }


FEW_CORES = 8
"""Up to here the worker gets every core: one kept free for the scheduler would cost more than it gains."""


def engine_dtype(dtype: str) -> str:
    """The recipe's dtype; "auto" is bfloat16 on a GPU and on CPUs with bf16 products, else float32."""
    from draftsmith.engine.install import has_cuda_gpu

    if dtype != "auto":
        return dtype
    return "bfloat16" if has_cuda_gpu() or multiplies_bf16() else "float32"


def cpu_environment(engine: Engine, kv_gib: int) -> dict[str, str]:
    """Variables for a CPU engine: the KV cache's size, Intel's OpenMP where the environment has it (vLLM's own advice
    for speculation), and all cores where there are few (vLLM keeps one per rank for its scheduler)."""
    added = {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib)}
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= FEW_CORES:
        added["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    iomp = engine.prefix / "lib" / "libiomp5.so"
    if iomp.is_file():
        added["LD_PRELOAD"] = ":".join(filter(None, [os.environ.get("LD_PRELOAD", ""), str(iomp)]))
    return added


def _pairs(command: list[str]) -> list[str]:
    """Words of a command with each flag's value beside it."""
    lines: list[str] = []
    for word in command:
        quoted = shlex.quote(word)
        if word.startswith("--") or not lines or not lines[-1].startswith("--") or " " in lines[-1]:
            lines.append(quoted)
        else:
            lines[-1] += " " + quoted
    head = next((i for i, line in enumerate(lines) if line.startswith("--")), len(lines))
    return [" ".join(lines[:head]), *lines[head:]]
