"""One function out of a long file without parsing the file: gpu_model_runner.py has 7,000 lines and takes a quarter second."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable

from draftsmith.engine.reader.modules import Module, Modules


def find_function(modules: Modules, module_name: str, name: str) -> tuple[Module, ast.FunctionDef] | None:
    """The first function (or method) of this name in a module, with its true line numbers. None where there is none.

    The module is only parsed if cutting the function out fails.
    """
    rel = module_name.replace(".", "/") + ".py"
    try:
        text = modules.source.read(rel)
    except FileNotFoundError:
        return None
    module = Module(module_name, rel, text, False)
    start = re.search(rf"^([ \t]*)(?:async )?def {re.escape(name)}\(", text, re.MULTILINE)
    if start is None:
        return None
    indent = len(start.group(1))
    # The body ends before the next line that is indented no deeper; the signature's closing bracket may stand there.
    ends = re.compile(rf"^[ \t]{{0,{indent}}}[^ \t\n#)\]]", re.MULTILINE)
    end = ends.search(text, start.end())
    piece = text[start.start() : end.start() if end else len(text)]
    line = text.count("\n", 0, start.start())
    try:
        # Empty lines before it give the nodes their true lines, for less than ast.increment_lineno takes.
        tree: ast.Module = ast.parse("\n" * line + textwrap.dedent(piece))
        nodes: Iterable[ast.AST] = tree.body
    except SyntaxError:
        whole = modules.get(module_name)
        if whole is None:
            return None
        nodes = ast.walk(whole.tree)
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return module, node
    return None
