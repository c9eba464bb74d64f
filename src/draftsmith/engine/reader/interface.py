"""Does a target class support EAGLE-3 in this release? vLLM asks `isinstance(model, SupportsEagle3)`, a runtime-checkable
Protocol: true where the protocol is an ancestor, or where the object has every member of it. Up to 0.10.0 there is no
protocol: the runner simply calls the methods.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from draftsmith.check.types import Evidence
from draftsmith.engine.reader.graph import ClassRef, Foreign, Graph
from draftsmith.engine.reader.modules import Module

INTERFACES = "vllm.model_executor.models.interfaces"
PROTOCOL = "SupportsEagle3"
RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils")
MESSAGE = "Model does not support EAGLE3 interface"
SETTER = "set_aux_hidden_state_layers"


@dataclass(frozen=True)
class Support:
    """supports: None where the class could not be followed (reason says why). through: the ancestors from the class
    down to the protocol, as names. evidence: the class statements on that way."""

    supports: bool | None
    reason: str
    through: tuple[str, ...] = ()
    evidence: list[Evidence] = field(default_factory=list)


@dataclass(frozen=True)
class Interface:
    """What this release asks of a target class. members: the names that an object must have."""

    protocol: ClassRef | None
    members: frozenset[str]
    where: Evidence | None
    raises: list[Evidence]


def read_interface(graph: Graph) -> Interface | None:
    """The protocol, or the methods that the runner calls where there is none; None where the release has no EAGLE-3."""
    raises = list(_raises(graph))
    protocol = graph.resolve_class(INTERFACES, PROTOCOL)
    if protocol is not None:
        members = frozenset(
            name
            for name in graph.members(protocol, annotations=True)
            if not (name.startswith("__") or name == "_abc_impl")
        )
        return Interface(protocol, members, protocol.evidence, raises)
    runner = graph.modules.get(RUNNERS[0])
    if runner is None or SETTER not in runner.text:
        return None
    called = {
        node.func.attr
        for node in ast.walk(runner.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.endswith("aux_hidden_state_layers")
    }
    line = runner.line_of(SETTER)
    where = runner.evidence_at(line, 2) if line else None
    return Interface(None, frozenset(called), where, raises)


def _raises(graph: Graph) -> Iterator[Evidence]:
    """Where the runners refuse a class without the interface (found as text: these files are long)."""
    for name in RUNNERS:
        rel = name.replace(".", "/") + ".py"
        if not graph.modules.source.exists(rel):
            continue
        module = Module(name, rel, graph.modules.source.read(rel), False)
        line = module.line_of(MESSAGE)
        if line:
            yield module.evidence_at(line, 2 if "but" in module.lines[line - 1] else 1)


def support_of(graph: Graph, interface: Interface, cls: ClassRef) -> Support:
    """Whether objects of `cls` pass the release's test. A class whose `__new__` makes objects of other classes (by the
    config's version, say) is answered only where all of them agree."""
    made = [other for other in _made_instead(graph, cls) if other != cls]
    own = _support_of(graph, interface, cls)
    differing = [other for other in made if _support_of(graph, interface, other).supports is not own.supports]
    if differing:
        names = ", ".join(other.name for other in made)
        return Support(
            None, f"{cls.name} makes objects of {names}, not all of which have {PROTOCOL}", (), [cls.evidence]
        )
    return own


def _made_instead(graph: Graph, cls: ClassRef) -> Iterator[ClassRef]:
    """The classes that the class's own `__new__` names, or takes from a module-level dict of classes."""
    hook = next((s for s in cls.node.body if isinstance(s, ast.FunctionDef) and s.name == "__new__"), None)
    for node in ast.walk(hook) if hook is not None else ():
        if not isinstance(node, ast.Name):
            continue
        found = graph.resolve(cls.module.name, node.id)
        table = graph.value(cls.module, node.id)
        if (
            isinstance(found, ClassRef)
            and node.id[:1].isupper()
            and any(b in graph.mro(found) for b in graph.bases(cls))
        ):
            yield found
        if isinstance(table, ast.Dict):
            for value in table.values:
                one = graph.resolve(cls.module.name, value.id) if isinstance(value, ast.Name) else None
                if isinstance(one, ClassRef):
                    yield one


def _support_of(graph: Graph, interface: Interface, cls: ClassRef) -> Support:
    mro = graph.mro(cls)
    if interface.protocol is not None and interface.protocol in mro:
        way = _way(graph, cls, interface.protocol)
        return Support(
            True,
            f"{cls.name} inherits {PROTOCOL}" + (f" through {', '.join(c.name for c in way[1:-1])}" if way[2:] else ""),
            tuple(c.name for c in way),
            [c.evidence for c in way[:-1]],
        )
    has = set(graph.members(cls))
    if interface.members and SETTER in has:
        has |= _instance_attributes(graph, cls)
        if interface.members <= has:
            owner = graph.members(cls).get(SETTER)
            evidence = [cls.evidence]
            if owner is not None:
                evidence.append(owner[0].module.evidence(owner[1], most=2))
            return Support(True, f"{cls.name} has every member of the interface", (cls.name,), evidence)
    lost = [c.name[1:] for c in mro if isinstance(c, Foreign) and c.name.startswith("?")]
    if lost:
        return Support(None, f"bases of {cls.name} could not be followed: {', '.join(lost)}", (), [cls.evidence])
    wanted = PROTOCOL if interface.protocol is not None else " and ".join(sorted(interface.members))
    return Support(False, f"{cls.name} lacks {wanted}", (), [cls.evidence])


def _way(graph: Graph, cls: ClassRef, goal: ClassRef) -> list[ClassRef]:
    """The shortest line of bases from a class to an ancestor, both included."""
    queue: list[list[ClassRef]] = [[cls]]
    seen = {cls}
    while queue:
        line = queue.pop(0)
        if line[-1] == goal:
            return line
        for base in graph.bases(line[-1]):
            if isinstance(base, ClassRef) and base not in seen:
                seen.add(base)
                queue.append([*line, base])
    return [cls, goal]


def _instance_attributes(graph: Graph, cls: ClassRef) -> set[str]:
    """Names that methods of the class or its ancestors set on `self`."""
    found: set[str] = set()
    for owner in graph.mro(cls):
        if not isinstance(owner, ClassRef):
            continue
        for node in ast.walk(owner.node):
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            for target in targets:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    found.add(target.attr)
    return found
