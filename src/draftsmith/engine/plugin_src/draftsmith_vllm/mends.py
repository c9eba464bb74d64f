"""The mends: new code for a faulty function, put into the function object itself.

Other modules hold references to the function (vllm/platforms/cpu.py hands it to the kernel dispatcher), so the
object stays and only its code changes. A mend is applied only if the source that was imported proves the fault.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from . import NAME, logger
from .faults import FAULTS, Fault, find_in, scope_in
from .hooks import after_import

# Every element of `input_val` [batch], replaced where it equals `replace_from`, repeated over the rows that belong to
# it and written into `output` [rows]: what the Triton kernel does (vllm/v1/sample/rejection_sampler.py, expand_kernel),
# in the dtype of `output`. The C++ kernel takes int64 alone, which would also cut a temperature of 0.8 to 0.
_EXPAND_KERNEL = """
def _expand_kernel_impl(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    ends = cu_num_tokens.to(torch.int64)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    expanded = torch.repeat_interleave(values, counts)
    output[: expanded.shape[0]].copy_(expanded)
"""

WHOLE: dict[str, str] = {"expand_kernel": _EXPAND_KERNEL}
"""Mend name → source of the whole function, to run in the names of its own module."""

STATEMENTS: dict[str, tuple[str, str]] = {
    # A prompt's part has yielded no token, so the stream begins again at the seed: what winding back by one draw does
    # on a GPU. (A request that was preempted after some tokens repeats the stream from its start; on a GPU it goes on.)
    "rewind_seed": (
        "gen.set_offset(gen.get_offset() - 4)",
        "gen.manual_seed(gen.initial_seed()) if gen.device.type == 'cpu' else gen.set_offset(gen.get_offset() - 4)",
    ),
    # The native form takes any number of heads, as the GPU's kernel does; the CPU's reads their number from the last
    # dimension (csrc/cpu/pos_encoding.cpp). A flat query [tokens, heads * size] goes to the kernel as before.
    "latent_rope": (
        "from vllm import _custom_ops as ops",
        "if query.dim() > 2:\n    return self.forward_native(positions, query, key)\nfrom vllm import _custom_ops as ops",
    ),
    # llvmlite's library answers every name, `__dict__` too, with a wrapped C function.
    "rebind_kernels": (
        "wrapper = lookup(vars(value).get('kernel'))",
        "wrapper = lookup(getattr(vars(value), 'get', lambda name: None)('kernel'))",
    ),
    # All experts as one group: the choice by score and bias, the weight by the score alone, as the GPU's kernel has it.
    "sigmoid_routing": (
        "assert self.scoring_func == 'softmax'",
        "if self.scoring_func == 'sigmoid':\n    return _grouped_topk(gating_output=router_logits, topk=self.top_k, "
        "renormalize=self.renormalize, num_expert_group=1, topk_group=1, scoring_func='sigmoid', "
        "routed_scaling_factor=self.routed_scaling_factor, e_score_correction_bias=self.e_score_correction_bias)\n"
        "assert self.scoring_func == 'softmax'",
    ),
}
"""Mend name → (statement, what stands in its place), in the normal form of `ast.unparse`; the rest of the function is
the installed one."""

MENDS = frozenset({*WHOLE, *STATEMENTS})

MENDED = "__draftsmith_mended__"


def function_of(module: ModuleType, dotted: str) -> FunctionType:
    """The plain function of this dotted name. ValueError if there is none."""
    found: object = module
    for name in dotted.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, FunctionType):
        raise ValueError(f"{module.__name__}.{dotted} is not a plain function")
    return found


def with_statement(source: str, dotted: str, old: str, new: str) -> str:
    """The function's own source with statement `new` in the place of `old`; without its decorators and annotations,
    which belong to the object and not to its code. ValueError where `old` is not there exactly once."""
    node = scope_in(source, dotted)
    if not isinstance(node, ast.FunctionDef):
        raise ValueError(f"{dotted} is not a function there")
    swap = _Swap(old, ast.parse(new).body)
    swap.visit(node)
    if swap.count != 1:
        raise ValueError(f"{dotted} holds {old!r} {swap.count} times")
    node.decorator_list, node.returns = [], None
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        argument.annotation = None
    return ast.unparse(ast.fix_missing_locations(node))


class _Swap(ast.NodeTransformer):
    def __init__(self, old: str, new: list[ast.stmt]) -> None:
        self.old, self.new, self.count = old, new, 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign | ast.Assert) and ast.unparse(node) == self.old:
            self.count += 1
            return self.new
        return self.generic_visit(node)


def replace_code(module: ModuleType, dotted: str, source: str) -> FunctionType:
    """Give the function `dotted` of `module` the code of `source`; the object, its references and its globals stay.

    ValueError if it is no plain function of that name or takes other parameters."""
    function = function_of(module, dotted)
    scope: dict[str, object] = {}
    exec(compile(source, f"<{NAME}: mend of {module.__name__}.{dotted}>", "exec"), module.__dict__, scope)
    new = scope[dotted.rpartition(".")[2]]
    assert isinstance(new, FunctionType)
    old_code = function.__code__
    count = old_code.co_argcount + old_code.co_kwonlyargcount
    new_count = new.__code__.co_argcount + new.__code__.co_kwonlyargcount
    if (
        old_code.co_varnames[:count] != new.__code__.co_varnames[:new_count]
        or old_code.co_freevars
        or new.__code__.co_freevars
    ):
        raise ValueError(f"{module.__name__}.{dotted} takes {old_code.co_varnames[:count]}, the mend does not")
    function.__code__ = new.__code__
    setattr(function, MENDED, True)
    return function


def mend(fault: Fault, module: ModuleType) -> bool:
    """Mend `fault` in its imported module; False (and no change) where its source does not prove it."""
    assert fault.mend is not None
    try:
        if getattr(function_of(module, fault.scope), MENDED, False):
            return True
    except ValueError:
        pass  # said below, if the source proves the fault
    path = getattr(module, "__file__", None)
    try:
        source = Path(path).read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError):
        source = ""
    found = find_in(fault, source)
    if found is None:
        logger.debug("%s: %s does not have fault %s; left as it is", NAME, module.__name__, fault.id)
        return False
    try:
        whole = WHOLE.get(fault.mend) or with_statement(source, fault.scope, *STATEMENTS[fault.mend])
        replace_code(module, fault.scope, whole)
    except ValueError as e:
        logger.warning("%s: fault %s at %s:%d is not mended: %s", NAME, fault.id, fault.file, found.line, e)
        return False
    logger.info("%s: mended %s (%s:%d: %s)", NAME, fault.id, fault.file, found.line, found.text)
    return True


def _module_name(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


_calls: dict[str, Callable[[ModuleType], None]] = {}


def apply_all(version: str) -> None:
    """Mend every fault of the table that has a mend, now or as soon as its module is imported."""
    for fault in FAULTS:
        if fault.mend is None:
            continue
        call = _calls.setdefault(fault.id, lambda module, fault=fault: _run(fault, module))  # type: ignore[misc]
        after_import(_module_name(fault.file), call)


def _run(fault: Fault, module: ModuleType) -> None:
    mend(fault, module)
