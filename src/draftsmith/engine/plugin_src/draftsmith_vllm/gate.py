"""Widen the list of model types that vLLM 0.11 to 0.21 allows EAGLE-3 for, in this process only.

`SpeculativeConfig._verify_args` holds the list as a constant of its code (vllm/config/speculative.py). Replacing the
attribute would do nothing, since pydantic has compiled the function object into its validator; so the object stays and
its code is exchanged. The list is widened at the moment of validation, by the one type that is asked for, and only
where that target's class has the interface in this release, or the shim (shim.py) is on and will give it: else the
engine would load all weights and refuse then.
"""

from __future__ import annotations

import os
from types import CodeType, FunctionType, ModuleType
from typing import Any

from . import NAME, TARGETS_VARIABLE, logger, wanted
from .hooks import after_import
from .interface import has_interface, has_layers

MODULE = "vllm.config.speculative"
CLASS, FUNCTION = "SpeculativeConfig", "_verify_args"
HOOK = "__draftsmith_gate__"
MARKS = ("llama", "qwen")
"""Every list so far holds both."""


def list_constant(code: CodeType) -> tuple[str, ...] | None:
    """The list as the compiler stored it; None where there is none (0.22 and later), or it was built otherwise."""
    for constant in code.co_consts:
        if (
            isinstance(constant, tuple)
            and all(isinstance(c, str) for c in constant)
            and all(m in constant for m in MARKS)
        ):
            return constant
    return None


def widened(code: CodeType, model_type: str) -> CodeType:
    """`code` with `model_type` added to its list."""
    old = list_constant(code)
    constants = tuple((*old, model_type) if c is old and old is not None else c for c in code.co_consts)
    return code.replace(co_consts=constants)


def target_class(config: Any) -> tuple[str, str, str] | None:
    """(architecture, module, class) that this engine will use for a target's ModelConfig; None if it does not say."""
    from vllm.model_executor.models.registry import ModelRegistry

    architecture = getattr(config, "architecture", None)
    entry = ModelRegistry.models.get(architecture) if isinstance(architecture, str) else None
    if entry is None or not isinstance(architecture, str):
        return None
    model_class = getattr(entry, "model_cls", None)
    if model_class is not None:
        return architecture, model_class.__module__, model_class.__name__
    module, name = getattr(entry, "module_name", None), getattr(entry, "class_name", None)
    return (architecture, module, name) if module and name else None


def types_to_add(config: Any, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The target's text model type if the list lacks it and its class can do EAGLE-3 (or the user named it)."""
    model_type = getattr(getattr(config, "hf_text_config", None), "model_type", None)
    if not isinstance(model_type, str) or any(word in model_type for word in allowed):
        return ()
    named = [w.strip() for w in os.environ.get(TARGETS_VARIABLE, "").split(",") if w.strip()]
    if model_type in named:
        logger.info("%s: model type %r added to the EAGLE-3 list, named in %s", NAME, model_type, TARGETS_VARIABLE)
        return (model_type,)
    found = target_class(config)
    if found is None:
        logger.warning("%s: the class for model type %r is not known; the EAGLE-3 list stays", NAME, model_type)
        return ()
    architecture, module, name = found
    if has_interface(module, name):
        logger.info(
            "%s: model type %r added to the EAGLE-3 list: %s has the interface (%s)", NAME, model_type, name, module
        )
        return (model_type,)
    if "interface" in wanted() and has_layers(module, name):
        logger.info("%s: model type %r added to the EAGLE-3 list: %s gets the interface here", NAME, model_type, name)
        return (model_type,)
    logger.warning(
        "%s: %s (%s) has no EAGLE-3 interface in this release; the list stays, since the engine would refuse after "
        "loading all weights",
        NAME,
        architecture,
        name,
    )
    return ()


def _call_gate(self: Any) -> Any:
    return __draftsmith_gate__(self)  # type: ignore[name-defined]  # noqa: F821  (a name of the engine's module)


def _widen(module: ModuleType) -> None:
    function = getattr(getattr(module, CLASS, None), FUNCTION, None)
    if not isinstance(function, FunctionType) or HOOK in module.__dict__:
        return
    original = function.__code__
    allowed = list_constant(original)
    if allowed is None:
        logger.debug("%s: %s.%s has no model-type list to widen", NAME, CLASS, FUNCTION)
        return
    if original.co_freevars or original.co_argcount != 1:
        logger.warning("%s: %s.%s has an unknown form; its list stays", NAME, CLASS, FUNCTION)
        return

    def gate(config: Any) -> Any:
        code = original
        for model_type in types_to_add(getattr(config, "target_model_config", None), allowed):
            code = widened(code, model_type)
        return FunctionType(code, module.__dict__, FUNCTION)(config)

    module.__dict__[HOOK] = gate
    function.__code__ = _call_gate.__code__.replace(co_name=FUNCTION, co_varnames=original.co_varnames[:1])


def install() -> None:
    after_import(MODULE, _widen)
