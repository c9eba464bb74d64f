"""The mends: new code for a faulty function, put into the function object itself.

Other modules hold references to the function (vllm/platforms/cpu.py hands it to the kernel dispatcher), so the
object stays and only its code changes. A mend is applied only if the source that was imported proves the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType

from . import NAME, logger
from .faults import FAULTS, Fault, find_in
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

MENDS: dict[str, str] = {"expand_kernel": _EXPAND_KERNEL}
"""Mend name → source of the whole function, to run in the names of its own module."""

MENDED = "__draftsmith_mended__"


def replace_code(module: ModuleType, name: str, source: str) -> FunctionType:
    """Give function `name` of `module` the code of `source`; the object, its references and its globals stay.

    ValueError if it is no plain function of that name or takes other parameters."""
    function = getattr(module, name, None)
    if not isinstance(function, FunctionType):
        raise ValueError(f"{module.__name__}.{name} is not a plain function")
    scope: dict[str, object] = {}
    exec(compile(source, f"<{NAME}: mend of {module.__name__}.{name}>", "exec"), module.__dict__, scope)
    new = scope[name]
    assert isinstance(new, FunctionType)
    old_code = function.__code__
    count = old_code.co_argcount + old_code.co_kwonlyargcount
    new_count = new.__code__.co_argcount + new.__code__.co_kwonlyargcount
    if old_code.co_varnames[:count] != new.__code__.co_varnames[:new_count] or old_code.co_freevars:
        raise ValueError(f"{module.__name__}.{name} takes {old_code.co_varnames[:count]}, the mend does not")
    function.__code__ = new.__code__
    function.__defaults__, function.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
    setattr(function, MENDED, True)
    return function


def mend(fault: Fault, module: ModuleType) -> bool:
    """Mend `fault` in its imported module; False (and no change) where its source does not prove it."""
    assert fault.mend is not None
    name = fault.scope
    if getattr(getattr(module, name, None), MENDED, False):
        return True
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
        replace_code(module, name, MENDS[fault.mend])
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
