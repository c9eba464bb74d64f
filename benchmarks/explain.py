"""How often `draftsmith explain` names the very line that made an error, from its message alone.

Raise sites of an installed vLLM are drawn at random. Each one's message is made by evaluating its own expression with
made-up values (Python itself fills the f-string, %-format or concatenation, so nothing of draftsmith's templates is
used), put into one of four log forms without any frame of the engine, and buried in the noise of several processes.

    python benchmarks/explain.py --engine ENV [--sites 300] [--seed 0]

Writes benchmarks/results/explain.json.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import platform
import random
import re
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from draftsmith.engine.reader import read_engine
from draftsmith.engine.trace import explain
from draftsmith.engine.trace_index import Index
from draftsmith.record import versions, write_json

HERE = Path(__file__).parent


class Anything:
    """A value for any name: prints as what it was drawn to be, allows any attribute, item, call or sum."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9)))
        number = str(rng.randint(0, 1 << rng.randint(2, 30)))
        self._text = rng.choice(
            [
                word,
                number,
                f"{word}_{number}",
                f"[{number}, {rng.randint(0, 99)}]",
                f"torch.{word}",
                f"{word}/{word}-{number}B",
            ]
        )

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(self._rng)

    def __call__(self, *args: Any, **kwargs: Any) -> Anything:
        return Anything(self._rng)

    def __getitem__(self, key: Any) -> Anything:
        return Anything(self._rng)

    def __format__(self, spec: str) -> str:
        return self._text

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def __iter__(self) -> Any:
        return iter([Anything(self._rng), Anything(self._rng)])

    def _number(self, other: Any = None) -> Anything:
        return Anything(self._rng)

    __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __pow__ = __neg__ = _number
    __mod__ = __and__ = __or__ = _number

    def __add__(self, other: Any) -> Any:
        return self._text + other if isinstance(other, str) else Anything(self._rng)

    def __radd__(self, other: Any) -> Any:
        return other + self._text if isinstance(other, str) else Anything(self._rng)

    def __lt__(self, other: Any) -> bool:
        return self._rng.random() < 0.5

    def __bool__(self) -> bool:
        return self._rng.random() < 0.5

    def __len__(self) -> int:
        return self._rng.randint(0, 9)

    def __index__(self) -> int:
        return self._rng.randint(0, 9)


class Names(dict):  # type: ignore[type-arg]
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def __missing__(self, key: str) -> Any:
        if hasattr(builtins, key) and key in (
            "str",
            "repr",
            "len",
            "list",
            "tuple",
            "sorted",
            "set",
            "type",
            "int",
            "dict",
        ):
            return getattr(builtins, key)
        self[key] = Anything(self.rng)
        return self[key]


def enclosing(tree: ast.Module) -> list[tuple[ast.Raise, list[ast.stmt], str | None]]:
    """Every raise with the body of its function and the type of a handler that it re-raises from."""
    found: list[tuple[ast.Raise, list[ast.stmt], str | None]] = []

    def walk(node: ast.AST, body: list[ast.stmt]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = child.body if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else body
            if isinstance(child, ast.Raise) and child.exc is not None:
                found.append((child, inner, None))
            walk(child, inner)

    walk(tree, tree.body)
    return found


def message_of(node: ast.Raise, body: list[ast.stmt], rng: random.Random) -> tuple[str, str] | None:
    """(exception type, message) as Python would make them; None where the exception has no words of its own."""
    names = Names(rng)
    made: ast.expr | None = node.exc
    for statement in ast.walk(ast.Module(body=body, type_ignores=[])):
        if not isinstance(statement, (ast.Assign, ast.AugAssign)) or statement.lineno >= node.lineno:
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if isinstance(target, ast.Name):
            if isinstance(made, ast.Name) and made.id == target.id and isinstance(statement, ast.Assign):
                made = statement.value
            needed = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if target.id in needed and any(
                isinstance(c, (ast.JoinedStr, ast.Constant)) for c in ast.walk(statement.value)
            ):
                try:
                    exec(compile(ast.Module(body=[statement], type_ignores=[]), "<site>", "exec"), {}, names)
                except Exception:
                    names.pop(target.id, None)
    if not isinstance(made, ast.Call):
        return None
    kind = ast.unparse(made.func).rpartition(".")[2]
    for argument in [*made.args, *(k.value for k in made.keywords if k.arg in ("message", "msg", "detail"))]:
        words = [c.value for c in ast.walk(argument) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
        if isinstance(argument, ast.Name) and isinstance(names.get(argument.id), str):
            words = [names[argument.id]]
        if not any(re.search(r"[A-Za-z]{3}.*[A-Za-z]{3}", w, re.DOTALL) for w in words):
            continue
        try:
            value = eval(compile(ast.Expression(argument), "<site>", "eval"), {"__builtins__": {}}, names)
        except Exception:
            return None
        return (kind, str(value)) if isinstance(value, str) else None
    return None


NOISE = (
    "INFO 11-30 16:05:{s:02d} [core.py:133] Initializing a V1 LLM engine with config: model='m', dtype=torch.bfloat16",
    "INFO 11-30 16:05:{s:02d} [gpu_model_runner.py:3021] Starting to load model m...",
    "WARNING 11-30 16:05:{s:02d} [system_utils.py:225] Overriding VLLM_WORKER_MULTIPROC_METHOD to 'spawn'",
    "Loading safetensors checkpoint shards:  {s}% Completed | {s}/100 [00:01<00:03,  4.07it/s]",
    "INFO 11-30 16:05:{s:02d} [parallel_state.py:1208] rank 0 in world size 2 is assigned as DP rank 0, PP rank 0",
    "[W1130 16:05:{s:02d}.123 ProcessGroupNCCL.cpp:1524] Warning: destroy_process_group() was not called",
    "/usr/lib/python3.12/multiprocessing/resource_tracker.py:279: UserWarning: resource_tracker: There appear to be 1 leaked",
)
PROCESSES = ("(APIServer pid=71) ", "(EngineCore_0 pid=95) ", "(Worker_TP0 pid=120) ", "(Worker_TP1 pid=121) ", "")
OUTSIDE = '  File "/usr/lib/python3.12/asyncio/runners.py", line 195, in run\n    return runner.run(main)'


def bury(kind: str, message: str, form: str, rng: random.Random) -> str:
    """A log in which the error stands once, in one of four forms, among other processes' lines."""
    prefix = PROCESSES[0] if form == "pydantic" else rng.choice(PROCESSES[1:4])
    if form == "logged":
        head = "ERROR 11-30 16:06:07 [core.py:866] "
        said = ["EngineCore failed to start.", "Traceback (most recent call last):", *OUTSIDE.split("\n")]
        said += f"{kind}: {message}".split("\n")
        block = [prefix + head + line for line in said]
    elif form == "pydantic":
        text = (
            f"pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n  Value error, {message}"
        )
        text += " [type=value_error, input_value=ArgsKwargs((), {'model': 'm'}), input_type=ArgsKwargs]\n"
        text += "    For further information visit https://errors.pydantic.dev/2.12/v/value_error"
        block = [
            PROCESSES[0] + line
            for line in ["Traceback (most recent call last):", *OUTSIDE.split("\n"), *text.split("\n")]
        ]
    elif form == "tail":
        block = [prefix + line for line in [*OUTSIDE.split("\n")[1:], *f"{kind}: {message}".split("\n")]]
    else:
        said = ["Traceback (most recent call last):", *OUTSIDE.split("\n"), *f"{kind}: {message}".split("\n")]
        block = [f"\x1b[1;36m{prefix}\x1b[0;0m{line}" for line in said]
    others = [rng.choice(PROCESSES) + rng.choice(NOISE).format(s=rng.randint(0, 59)) for _ in range(40)]
    mixed = others[:20]
    for line in block:
        mixed.append(line)
        if rng.random() < 0.5:
            mixed.append(
                rng.choice([p for p in PROCESSES if p.strip() != prefix.strip()][:2]) + rng.choice(NOISE).format(s=1)
            )
    mixed += others[20:30]
    mixed.append(PROCESSES[0] + "Traceback (most recent call last):")
    mixed += [PROCESSES[0] + line for line in OUTSIDE.split("\n")]
    mixed.append(
        PROCESSES[0] + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    )
    return "\n".join(mixed)


def draw(
    root: Path, package: str, count: int, rng: random.Random
) -> tuple[list[tuple[str, int, str, str]], dict[str, int]]:
    """[(file, line, type, message)] of raise sites drawn evenly over all raise statements, and what was passed over."""
    files = sorted((root / package).rglob("*.py"))
    weights = [len(re.findall(rb"^\s+raise \w", p.read_bytes(), re.MULTILINE)) for p in files]
    drawn: list[tuple[str, int, str, str]] = []
    seen: set[tuple[str, int]] = set()
    passed = {"raise sites drawn": 0, "no words of its own, or not evaluated": 0}
    trees: dict[Path, list[Any]] = {}
    while len(drawn) < count:
        path = rng.choices(files, weights)[0]
        if path not in trees:
            trees[path] = enclosing(ast.parse(path.read_bytes()))
        if not trees[path]:
            continue
        node, body, _ = rng.choice(trees[path])
        rel = str(path.relative_to(root))
        if (rel, node.lineno) in seen:
            continue
        seen.add((rel, node.lineno))
        passed["raise sites drawn"] += 1
        made = message_of(node, body, rng)
        if made is None or not made[1].strip():
            passed["no words of its own, or not evaluated"] += 1
            continue
        drawn.append((rel, node.lineno, *made))
    return drawn, passed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--sites", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "explain.json")
    parser.add_argument("--show", action="store_true", help="print what was not found")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    facts = read_engine(options.engine)
    root = facts.source.path("")
    assert root is not None, "the engine must lie in a folder"
    drawn, passed = draw(root, facts.name, options.sites, rng)
    index = Index(facts.source, facts.name)
    rows: list[dict[str, Any]] = []
    for n, (file, line, kind, message) in enumerate(drawn):
        form = ("logged", "pydantic", "tail", "coloured")[n % 4]
        log = bury(kind, message, form, rng)
        if n % 25 == 0:
            # A new index: the time of a cold answer, nothing read or parsed yet.
            index = Index(facts.source, facts.name)
        started = time.perf_counter()
        found = explain(log, index)
        seconds = time.perf_counter() - started
        place = found.place if found else None
        exact = place is not None and (place.file, place.line) == (file, line)
        among = exact or (found is not None and any((p.file, p.line) == (file, line) for p in found.others))
        got = f"{place.file}:{place.line}" if place else None
        rows.append(
            {
                "site": f"{file}:{line}",
                "form": form,
                "exact": exact,
                "among_equal": among,
                "equal": len(found.others) if found else 0,
                "got": got,
                "seconds": round(seconds, 3),
                "cold": n % 25 == 0,
            }
        )
        if options.show and not exact:
            print(json.dumps(rows[-1]), kind, repr(message[:200]), file=sys.stderr)
    exact, among = sum(r["exact"] for r in rows), sum(r["among_equal"] for r in rows)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False
    )
    write_json(
        options.out,
        {
            "claim": "explain names the file and line of the raise from its message alone, in noise",
            "command": "python benchmarks/explain.py --engine ENV",
            "machine": f"{platform.machine()}, 2 cores",
            "versions": versions() | {facts.name: facts.version},
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit.stdout.strip(),
            "ours": exact,
            "theirs": len(rows),
            "unit": "raise sites",
            "ratio": round(exact / len(rows), 4),
            "among_equal_texts": among,
            "text_in_one_place_only": sum(r["equal"] == 0 for r in rows),
            "of_these_exact": sum(r["equal"] == 0 and r["exact"] for r in rows),
            "passed_over": passed,
            "seconds_cold": sorted(r["seconds"] for r in rows if r["cold"]),
            "seconds_warm_median": sorted(r["seconds"] for r in rows if not r["cold"])[len(rows) * 24 // 50],
            "rows": rows,
        },
    )
    print(f"{exact} of {len(rows)} exact, {among} with places of equal text; {passed}")


if __name__ == "__main__":
    main()
