"""A second reading of vLLM's gate that shares no code with draftsmith: regular expressions over text, names chased by hand,
and package entry files executed with fake imports (so Python itself decides the platform branches). For gate_agreement.py.
"""

from __future__ import annotations

import builtins
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CLASS = re.compile(r"^( *)class (\w+)[ \t]*(?:\((.*?)\))?[ \t]*:", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r'^ {4}"(\w+)":\s*\(\s*"([\w.]+)",\s*"(\w+)",?\s*\)', re.MULTILINE)
IMPORT = re.compile(r"^( *)from +([\w.]+) +import +(?:\(([^)]*)\)|([^\n\\]*(?:\\\n[^\n]*)*))", re.MULTILINE)


class Fake:
    """Whatever a package's entry file imports: remembers its dotted name."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, attr: str) -> Any:
        if attr.startswith("__"):
            raise AttributeError(attr)
        return Fake(f"{self._name}.{attr}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Fake(f"{self._name}()")


class FakePlatform:
    def __init__(self, name: str) -> None:
        self.name = name
        self.device_type = "cuda" if name == "rocm" else name

    def __getattr__(self, attr: str) -> Any:
        if attr == "is_cuda_alike":
            return lambda: self.name in ("cuda", "rocm")
        return lambda: attr == f"is_{self.name}"


def strip_comments(text: str) -> str:
    return re.sub(r"(?m)[ \t]*#.*$", "", text)


def split_bases(text: str) -> list[str]:
    """Base expressions at bracket depth 0, without keyword arguments and subscripts."""
    parts, depth, current = [], 0, ""
    for c in strip_comments(text):
        depth += c in "([{"
        depth -= c in ")]}"
        if c == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += c
    parts.append(current)
    plain = [re.sub(r"\[.*", "", p, flags=re.DOTALL).strip() for p in parts if p.strip() and "=" not in p]
    # as_embedding_model(X) makes a subclass of X
    return [re.sub(r"^as_\w+\((\w+)\)$", r"\1", p) for p in plain]


@dataclass
class File:
    path: Path
    text: str
    classes: dict[str, list[str]] = field(default_factory=dict)
    bodies: dict[str, str] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


class SecondReading:
    """One release: `root` is the folder that holds vllm/, platform what the branches are decided for."""

    def __init__(self, root: Path, platform: str) -> None:
        self.root, self.platform = root, platform
        self.files: dict[str, File | None] = {}
        interfaces = root / "vllm/model_executor/models/interfaces.py"
        self.has_protocol = "class SupportsEagle3" in interfaces.read_text()
        self.registry = self._registry()

    def _registry(self) -> dict[str, tuple[str, str]]:
        text = (self.root / "vllm/model_executor/models/registry.py").read_text()
        until = text.index("\n_VLLM_MODELS")
        return {a: (m, c) for a, m, c in ENTRY.findall(strip_comments(text[:until]))}

    def model_types(self) -> tuple[str, ...] | None:
        """The list as text, None where there is none."""
        for name in ("config/speculative.py", "config/__init__.py", "config.py"):
            path = self.root / "vllm" / name
            if not path.exists() or "class SpeculativeConfig" not in path.read_text():
                continue
            text = path.read_text()
            one = re.search(r'"(\w+)" not in self\.target_model_config\.hf_text_config\.model_type', text)
            if one:
                return (one.group(1),)
            many = re.search(r"\n *\w+_supported = \[(.*?)\]", text, re.DOTALL)
            if many and "is only supported for" in text:
                return tuple(re.findall(r'"(\w+)"', many.group(1)))
            return None
        raise LookupError("no SpeculativeConfig")

    def file(self, module: str) -> File | None:
        if module not in self.files:
            stem = self.root / module.replace(".", "/")
            path = stem.with_suffix(".py") if stem.with_suffix(".py").exists() else stem / "__init__.py"
            self.files[module] = self._read(path, module) if path.exists() else None
        return self.files[module]

    def _read(self, path: Path, module: str) -> File:
        text = path.read_text()
        found = File(path, text)
        spots = list(CLASS.finditer(text))
        for n, m in enumerate(spots):
            opener = _above(text, m.start())
            inside = len(m.group(1)) == 4 and re.search(r"\n(if|else|try|except)[^\n]*:\s*$", opener)
            top = m.group(1) == "" or (inside and "TYPE_CHECKING" not in opener)
            if top:
                found.classes[m.group(2)] = split_bases(m.group(3) or "")
                found.bodies[m.group(2)] = text[m.start() : spots[n + 1].start() if n + 1 < len(spots) else len(text)]
        package = path.name == "__init__.py"
        for _, source, block, line in IMPORT.findall(text):
            for item in strip_comments(block or line).replace("\\\n", " ").split(","):
                words = item.split()
                if words:
                    found.imports.setdefault(words[-1], (absolute(module, package, source), words[0]))
        for name, value in re.findall(r"^(?: {4})?(\w+) = (\w+)$", text, re.MULTILINE):
            found.aliases[name] = value
        return found

    def entry_package(self, module: str, name: str) -> tuple[str, str] | None:
        """(module, class) that a package's entry file binds `name` to, by running that file with fake imports."""
        stem = self.root / module.replace(".", "/")
        init = stem / "__init__.py"
        if stem.with_suffix(".py").exists() or not init.exists():
            return None

        def fake_import(what: str, _g: Any = None, _l: Any = None, names: Any = (), level: int = 0) -> Any:
            if what == "typing" and level == 0:
                return typing
            full = absolute(module, True, "." * level + what)
            if full == "vllm.platforms":
                return SimpleNamespace(current_platform=FakePlatform(self.platform))
            return Fake(full if names else full.split(".")[0])

        scope: dict[str, Any] = {"__name__": module, "__builtins__": {**vars(builtins), "__import__": fake_import}}
        exec(compile(init.read_text(), str(init), "exec"), scope)
        value = scope.get(name)
        if value is None and "__getattr__" in scope:
            value = scope["__getattr__"](name)
        if not isinstance(value, Fake):
            return None
        owner, _, attr = value._name.rpartition(".")
        return owner, attr

    def supports(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> bool | None:
        """Whether class `name` of `module` leads to SupportsEagle3 (or defines what up to 0.10.0 is called); None: lost."""
        if name == "SupportsEagle3":
            return True
        if name == "object" or (module, name) in seen or not module.startswith("vllm"):
            return False
        seen = seen | {(module, name)}
        file = self.file(module)
        if file is None:
            return None
        if name not in file.classes:
            moved = self.entry_package(module, name) if file.path.name == "__init__.py" else None
            if moved is not None and moved != (module, name):
                return self.supports(*moved, seen)
            if name in file.imports:
                return self.supports(*file.imports[name], seen)
            if name in file.aliases:
                return self.supports(module, file.aliases[name], seen)
            return None
        if not self.has_protocol and "def set_aux_hidden_state_layers(" in file.bodies[name]:
            return True
        results: list[bool | None] = []
        for base in file.classes[name]:
            if base in file.classes or base in file.imports or base in file.aliases:
                results.append(
                    self.supports(module, base, seen)
                    if base in file.classes
                    else self._outside(file, module, base, seen)
                )
        return True if True in results else None if None in results else False

    def _outside(self, file: File, module: str, base: str, seen: frozenset[tuple[str, str]]) -> bool | None:
        if base in file.aliases and base not in file.imports:
            return self.supports(module, file.aliases[base], seen)
        owner, real = file.imports[base]
        return self.supports(owner, real, seen)

    def verdict(self, architecture: str) -> bool | None:
        relative, cls = self.registry[architecture]
        module = relative if relative.startswith("vllm.") else f"vllm.model_executor.models.{relative}"
        return self.supports(module, cls)


def _above(text: str, at: int) -> str:
    """The text up to the line that opens the block in which position `at` stands, seen from its indentation."""
    lines = text[:at].split("\n")
    while lines and (not lines[-1].strip() or lines[-1].startswith((" ", "\t"))):
        lines.pop()
    return "\n" + (lines[-1] if lines else "")


def absolute(module: str, package: bool, source: str) -> str:
    dots = len(source) - len(source.lstrip("."))
    if not dots:
        return source
    parts = module.split(".")
    parts = parts[: len(parts) - dots + (1 if package else 0)]
    return ".".join([*parts, source[dots:]]).rstrip(".")
