"""The words of a verdict: evidence, rows, the verdict, the context that checks look at, and the registry of checks.

A check is a plain function `(ctx: Context) -> Iterator[CheckRow]` under `@check(...)` in any module of this package;
check/run.py imports the modules and calls `run_checks`. Nothing here imports torch or transformers.

    @check("form", ids=("form.architecture",), needs=("drafter_config", "engine"))
    def architecture(ctx: Context) -> Iterator[CheckRow]:
        yield CheckRow("form.architecture", "form", "pass", "LlamaForCausalLMEagle3 is registered")
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftsmith.errors import Exit, UserError
from draftsmith.record import read_json

if TYPE_CHECKING:
    from draftsmith.contract import Contract
    from draftsmith.engine.reader import EngineFacts

Status = Literal["pass", "warn", "fail", "skip"]
Group = Literal["gate", "form", "pair", "runner", "silence", "engine"]
GROUPS: tuple[Group, ...] = ("gate", "form", "pair", "runner", "silence", "engine")
"""In the order in which they are printed."""


@dataclass(frozen=True)
class Evidence:
    """A place in a file: path as the engine's reader names it, 1-based line, the text found there (may be several lines)."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class CheckRow:
    """One answer. `found` says what is there, with values; `fix` what to do ("" where nothing is to be done).

    skip = the check could not be made (found says why); a skipped gate row makes the verdict "unknown".
    """

    id: str
    group: Group
    status: Status
    found: str
    evidence: list[Evidence] = field(default_factory=list)
    fix: str = ""


@dataclass(frozen=True)
class EngineId:
    """Which engine was asked. None where no engine was."""

    name: str | None = None
    version: str | None = None
    path: str | None = None


@dataclass(frozen=True)
class Verdict:
    """yes: the engine takes the pair; no: some check fails; unknown: a gate check could not be made."""

    verdict: Literal["yes", "no", "unknown"]
    engine: EngineId
    checks: list[CheckRow]

    @staticmethod
    def of(engine: EngineId, checks: Iterable[CheckRow]) -> Verdict:
        rows = list(checks)
        if any(row.status == "fail" for row in rows):
            return Verdict("no", engine, rows)
        gate = [row for row in rows if row.group == "gate"]
        if not gate or any(row.status == "skip" for row in gate):
            return Verdict("unknown", engine, rows)
        return Verdict("yes", engine, rows)

    @property
    def exit_code(self) -> Exit:
        return {"yes": Exit.OK, "no": Exit.NO, "unknown": Exit.UNKNOWN}[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """{"verdict", "engine": {"name", "version", "path"}, "checks": [{"id", "group", "status", "found",
        "evidence": [{"file", "line", "text"}], "fix"}]}: a stable format (docs, other tools read it)."""
        return {"verdict": self.verdict, "engine": asdict(self.engine), "checks": [asdict(row) for row in self.checks]}


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as a safetensors header declares it. dtype in safetensors' words (BF16, I64, BOOL, …);
    start and end are absolute byte offsets in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


@dataclass(frozen=True)
class Options:
    """What the user says about the launch. None = what the engine would choose.

    method: `method` of the speculative config, None = let the engine guess it from the drafter's path.
    gpu_memory: bytes of one accelerator. platform: "cuda", "rocm" or "cpu". model_impl: "auto", "vllm", "transformers".
    env: environment variables of the launch that engines look at (VLLM_USE_V2_MODEL_RUNNER …). plugin: the launch loads
    draftsmith's runtime plugin, as serve, bench and run do; False asks for the engine as it is.
    """

    max_model_len: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    num_speculative_tokens: int | None = None
    method: str | None = None
    dtype: str | None = None
    gpu_memory: int | None = None
    platform: str | None = None
    model_impl: str = "auto"
    deep: bool = False
    env: dict[str, str] = field(default_factory=dict)
    plugin: bool = False


class Context:
    """What the checks look at. Every field is read on first use and once; None = not given.

    Paths: target_folder, drafter_folder, engine_path (what the user typed). Fields given by keyword replace what
    would be read, so that tests and `--before-training` need no files:
        Context(target_config={...}, engine=read_engine(path))
    """

    target_folder: Path | None
    drafter_folder: Path | None
    engine_path: str | None
    options: Options

    def __init__(
        self,
        target_folder: Path | None = None,
        drafter_folder: Path | None = None,
        engine_path: str | None = None,
        options: Options | None = None,
        **known: Any,
    ) -> None:
        self.target_folder, self.drafter_folder, self.engine_path = target_folder, drafter_folder, engine_path
        self.options = options or Options()
        for name, value in known.items():
            if not isinstance(getattr(type(self), name, None), cached_property):
                raise TypeError(f"Context has no lazy field {name}")
            self.__dict__[name] = value

    @cached_property
    def target_config(self) -> dict[str, Any] | None:
        """The target's config.json, outer level."""
        return _config(self.target_folder)

    @cached_property
    def target_text_config(self) -> dict[str, Any] | None:
        """The part of the target's config that describes its language model (the whole, where it is flat)."""
        from draftsmith.target.config import text_config

        return None if self.target_config is None else text_config(self.target_config)

    @cached_property
    def drafter_config(self) -> dict[str, Any] | None:
        """The drafter's config.json."""
        return _config(self.drafter_folder)

    @cached_property
    def drafter_headers(self) -> dict[str, TensorHeader] | None:
        """Every tensor of the drafter by name, from safetensors headers; None without a drafter."""
        from draftsmith.check.headers import read_headers

        return None if self.drafter_folder is None else read_headers(self.drafter_folder)

    @cached_property
    def target_headers(self) -> dict[str, TensorHeader] | None:
        from draftsmith.check.headers import read_headers

        return None if self.target_folder is None else read_headers(self.target_folder)

    @cached_property
    def contract(self) -> Contract | None:
        """contract.json beside the drafter, where there is one."""
        from draftsmith.contract import FILE, Contract

        if self.drafter_folder is None or not (self.drafter_folder / FILE).exists():
            return None
        return Contract.load(self.drafter_folder)

    @cached_property
    def engine(self) -> EngineFacts | None:
        """Facts of the engine, read from its source."""
        from draftsmith.engine.reader import read_engine

        return None if self.engine_path is None else read_engine(self.engine_path)


def _config(folder: Path | None) -> dict[str, Any] | None:
    """config.json of a model folder. UserError where it is missing, not JSON, or not an object."""
    if folder is None:
        return None
    path = folder / "config.json"
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{folder} holds no config.json", fix="give the folder of a model") from None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} cannot be read as JSON: {e}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object")
    return value


CheckFunction = Callable[[Context], Iterator[CheckRow]]


@dataclass(frozen=True)
class Check:
    """A registered check: the ids of its rows, and the context fields that it cannot do without."""

    name: str
    group: Group
    ids: tuple[str, ...]
    needs: tuple[str, ...]
    run: CheckFunction


REGISTRY: dict[str, Check] = {}
_MISSING = {
    "target_config": "no target given",
    "target_text_config": "no target given",
    "target_headers": "no target folder given",
    "drafter_config": "no drafter given",
    "drafter_headers": "no drafter given",
    "contract": "no contract.json beside the drafter",
    "engine": "no engine given and none found",
}


def check(group: Group, ids: tuple[str, ...], needs: tuple[str, ...] = ()) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check. Where one of `needs` is None the check is not called and each of `ids` is a skip row."""

    def decorate(function: CheckFunction) -> CheckFunction:
        name = f"{function.__module__}.{function.__name__}"
        REGISTRY[name] = Check(name, group, ids, needs, function)
        return function

    return decorate


def run_checks(ctx: Context, groups: Collection[Group] | None = None) -> Iterator[CheckRow]:
    """Rows of all registered checks, in the order of GROUPS, then of registration."""
    for group in GROUPS:
        if groups is not None and group not in groups:
            continue
        for one in [c for c in REGISTRY.values() if c.group == group]:
            missing = next((need for need in one.needs if getattr(ctx, need) is None), None)
            if missing is None:
                yield from one.run(ctx)
            else:
                for row_id in one.ids:
                    yield CheckRow(row_id, group, "skip", _MISSING.get(missing, f"no {missing}"))
