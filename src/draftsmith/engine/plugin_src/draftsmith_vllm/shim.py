"""Give a loaded target vLLM's EAGLE-3 interface where its class lacks it: record the stream entering the chosen layers.

The decoder layers are found by structure, not by name, and what a layer hands on is proved on the loaded modules before
anything is recorded: most classes keep the stream in two parts, `hidden` and `residual`, whose sum it is, and some
(Cohere) hand on a whole stream beside a spent residual. Where neither can be proved the class is refused and the engine
says what it would have said.

The decoder's `forward` returns the states beside its output, so that under torch.compile they are outputs of the traced
graph and no side effect; its `__call__` takes them off again, and the outer `forward` hands both to the runner. Neither
the weights nor any computation of the target changes.

DRAFTSMITH_VLLM_SHIM   "force": also for a class with an interface of its own (to measure what this one costs)
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from . import NAME, logger
from .hooks import after_import

VARIABLE = "DRAFTSMITH_VLLM_SHIM"
RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner"),
)
SETUP = "_setup_eagle3_aux_hidden_state_outputs"
ASKED = "supports_eagle3"
SETTERS = ("vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils", "vllm.v1.worker.gpu.model_runner")
SETTER = "set_eagle3_aux_hidden_state_layers"
HIDDEN_NAMES = ("hidden_states", "hidden", "x", "inputs")
RESIDUAL_NAMES = ("residual", "residuals")
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


class RefusedError(RuntimeError):
    """The class has no form that this shim can prove."""


@dataclass
class Recorder:
    """What one forward has passed so far. layers: ascending ids; id k is the stream entering layer k."""

    layers: tuple[int, ...] = ()
    states: list[Any] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Decoder:
    """owner: the module whose forward runs `layers`. whole: the first part that a layer hands on is the stream itself,
    else the sum of both parts is."""

    owner: Any
    layers: Any
    whole: bool


def language_part(model: Any) -> Any:
    """The language model inside a multimodal wrapper, as the engine names it."""
    if hasattr(model, "get_language_model"):
        return model.get_language_model()
    return getattr(model, "language_model", model)


def layer_count(config: Any) -> int | None:
    for name in COUNTS:
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None


def find_layers(model: Any, count: int | None) -> tuple[Any, Any]:
    """(owner, layers): the one outermost list of `count` modules in the language part. RefusedError if it is not the only
    one."""
    import torch.nn as nn

    found: list[tuple[str, Any, Any]] = []
    for name, owner in language_part(model).named_modules():
        for child in owner.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                found.append((name, owner, child))
    # Experts may be as many as layers; their lists lie inside one.
    outermost = [f for f in found if not any(f[0] != o[0] and f[0].startswith(f"{o[0]}.".lstrip(".")) for o in found)]
    if len(outermost) != 1:
        raise RefusedError(f"{type(model).__name__}: {len(outermost)} lists of {count} decoder layers, one is needed")
    return outermost[0][1], outermost[0][2]


def parameters(module: Any) -> list[str]:
    """Names of what its forward takes. The engine's own operators say it in `forward_native`."""
    function = getattr(type(module), "forward_native", None) or type(module).forward
    return list(inspect.signature(function).parameters)[1:]


def _named(words: Sequence[str], names: Sequence[str]) -> str | None:
    return next((w for w in words if w in names), None)


def hands_on_whole(layer: Any, hidden: int) -> bool:
    """Is the first part that this layer takes the whole stream? Asked of the layer's own first norm: a fused one gives
    x + residual back as the new residual, one that leaves the residual alone has no use for it. RefusedError otherwise."""
    import torch

    if _named(parameters(layer), RESIDUAL_NAMES) is None:
        return True
    norm = next((c for c in layer.children() if _named(parameters(c), RESIDUAL_NAMES) is not None), None)
    weight = None if norm is None else getattr(norm, "weight", None)
    if norm is None or weight is None:
        raise RefusedError(f"{type(layer).__name__} takes a residual, and no norm of it shows what that is")
    generator = torch.Generator().manual_seed(0)
    x, r = (torch.randn(2, hidden, generator=generator).to(weight.device, weight.dtype) for _ in range(2))
    with torch.no_grad():
        out = norm(x.clone(), r.clone())
    if not isinstance(out, tuple) or len(out) != 2:
        raise RefusedError(f"{type(norm).__name__} of {type(layer).__name__} gives no residual back")
    if torch.allclose(out[1], x + r, atol=2e-2, rtol=2e-2):
        return False
    if torch.equal(out[1], r):
        return True
    raise RefusedError(f"{type(norm).__name__} of {type(layer).__name__} makes an unknown residual")


def find_decoder(model: Any, config: Any) -> Decoder:
    """Owner and layers of a loaded target, with the form of the stream proved on every layer. config: its text config."""
    hidden = getattr(config, "hidden_size", None) or getattr(config, "n_embd", None)
    owner, layers = find_layers(model, layer_count(config))
    forms = {hands_on_whole(layer, int(hidden or 0)) for layer in layers}
    if len(forms) != 1:
        raise RefusedError(f"{type(model).__name__}: its layers hand on their stream in different forms")
    return Decoder(owner, layers, forms.pop())


def stream_of(hidden: Any, residual: Any, whole: bool) -> Any:
    """[tokens, H]; a copy where later layers may write into the tensor in place."""
    return hidden.clone() if whole or residual is None else hidden + residual


def record(decoder: Decoder, recorder: Recorder, ids: Sequence[int]) -> None:
    """Hook the layers of `ids`, in place of those hooked before. RuntimeError for an id out of 0 … n."""
    layers = tuple(sorted({int(k) for k in ids}))
    count = len(decoder.layers)
    if not layers or layers[0] < 0 or layers[-1] > count:
        raise RuntimeError(f"{NAME}: aux layer ids {layers} for a target of {count} layers")
    for handle in recorder.handles:
        handle.remove()
    recorder.layers, recorder.handles = layers, []
    whole = decoder.whole
    for k in layers:
        if k < count:
            layer = decoder.layers[k]
            names = parameters(layer)
            first = _named(HIDDEN_NAMES, names)
            second = _named(RESIDUAL_NAMES, names)
            if first is None:
                raise RefusedError(f"{type(layer).__name__}.forward has none of {', '.join(HIDDEN_NAMES)}")
            hook = _before(recorder, first, names.index(first), second, names.index(second) if second else -1, whole)
            recorder.handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        else:
            recorder.handles.append(decoder.layers[-1].register_forward_hook(_after(recorder, whole)))


def _before(recorder: Recorder, first: str, at: int, second: str | None, second_at: int, whole: bool) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[at] if at < len(args) else kwargs[first]
        residual = None
        if second is not None:
            residual = args[second_at] if second_at < len(args) else kwargs.get(second)
        recorder.states.append(stream_of(hidden, residual, whole))

    return hook


def _after(recorder: Recorder, whole: bool) -> Any:
    def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
        hidden, residual = (output[0], output[1]) if isinstance(output, tuple) else (output, None)
        recorder.states.append(stream_of(hidden, residual, whole))

    return hook


def _subclass(module: Any, **members: Any) -> None:
    """Put `module` alone under a class of the same name with further members."""
    cls = type(module)
    keep = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    module.__class__ = type(cls.__name__, (cls,), keep | members)


def _returning(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """`original` with the recorded states beside its output."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.states = []
        out = original(self, *args, **kwargs)
        states = recorder.states
        recorder.states = []
        return out, states

    return forward


def _recompile(owner: Any) -> None:
    """Let torch.compile take the new forward: its wrapper binds `forward` when the model is made."""
    if getattr(owner, "do_not_compile", True):
        return
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    from vllm.config import set_current_vllm_config

    known = inspect.signature(TorchCompileWithNoGuardsWrapper.__init__).parameters
    kept = {"compile_prefix": "_compile_prefix", "is_encoder": "_is_encoder"}
    given = {word: getattr(owner, attribute) for word, attribute in kept.items() if word in known}
    if hasattr(owner, "cleanup"):
        owner.cleanup()
    with set_current_vllm_config(owner.vllm_config):
        TorchCompileWithNoGuardsWrapper.__init__(owner, **given)


def give(model: Any, text_config: Any, pipeline_stages: int = 1) -> Decoder:
    """Give the loaded target the interface. RefusedError where its form cannot be proved; nothing is changed then."""
    if pipeline_stages > 1:
        raise RefusedError("aux states of earlier pipeline stages would be lost")
    decoder = find_decoder(model, text_config)
    recorder = Recorder()

    def set_aux_hidden_state_layers(self: Any, layers: tuple[int, ...]) -> None:
        record(decoder, recorder, layers)
        logger.info("%s: %s gives the streams entering layers %s", NAME, type(self).__name__, recorder.layers)

    def default_layers(self: Any) -> tuple[int, ...]:
        n = len(decoder.layers)
        return (2, n // 2, n - 3)

    interface = {
        "supports_eagle3": True,
        "has_own_lm_head": False,
        "has_own_embed_tokens": False,
        "set_aux_hidden_state_layers": set_aux_hidden_state_layers,
        "get_eagle3_default_aux_hidden_state_layers": default_layers,
        "get_eagle3_aux_hidden_state_layers": default_layers,  # its name up to 0.17
    }
    owner_class, model_class = type(decoder.owner), type(model)
    if decoder.owner is model:
        _subclass(model, forward=_returning(model_class.forward, recorder), **interface)
        _recompile(model)
        return decoder
    taken: list[Any] = []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out, states = owner_class.__call__(self, *args, **kwargs)
        taken[:] = states
        return out

    @functools.wraps(model_class.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return model_class.forward(self, *args, **kwargs), list(taken)

    _subclass(decoder.owner, forward=_returning(owner_class.forward, recorder), __call__=call)
    _recompile(decoder.owner)
    _subclass(model, forward=forward, **interface)
    return decoder


def ensure(model: Any, model_config: Any, parallel_config: Any) -> None:
    """Give the interface where it is missing (or where the environment forces it); a refusal is told and left to the
    engine."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    forced = os.environ.get(VARIABLE) == "force"
    if supports_eagle3(model) and not forced:
        return
    try:
        decoder = give(model, model_config.hf_text_config, parallel_config.pipeline_parallel_size)
    except RefusedError as e:
        logger.warning("%s: no EAGLE-3 interface can be given: %s", NAME, e)
        return
    logger.info(
        "%s: gave %s the EAGLE-3 interface (%d layers of %s)",
        NAME,
        type(model).__name__,
        len(decoder.layers),
        type(decoder.owner).__name__,
    )


def _before_setup(cls: type) -> None:
    """The V1 runner asks its model for the interface in one method; ours goes first."""
    setup = cls.__dict__.get(SETUP)
    if setup is None or getattr(setup, "_draftsmith_shim", False):
        return

    @functools.wraps(setup)
    def with_interface(self: Any) -> Any:
        if self.use_aux_hidden_state_outputs or getattr(type(self), "_draftsmith_tapped", False):
            ensure(self.get_model(), self.vllm_config.model_config, self.vllm_config.parallel_config)
        return setup(self)

    with_interface._draftsmith_shim = True  # type: ignore[attr-defined]
    setattr(cls, SETUP, with_interface)


def _before_inline(module: ModuleType, cls: Any) -> None:
    """Up to 0.21 the V1 runner asks in the middle of load_model, by a function that its module knows by name."""
    asked = getattr(module, ASKED, None)
    if asked is None or getattr(asked, "_draftsmith_shim", False):
        return
    load = cls.load_model
    runner: list[Any] = []

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        runner[:] = [self]
        return load(self, *args, **kwargs)

    @functools.wraps(asked)
    def with_interface(model: Any) -> Any:
        if runner:
            ensure(model, runner[0].vllm_config.model_config, runner[0].vllm_config.parallel_config)
        return asked(model)

    with_interface._draftsmith_shim = True  # type: ignore[attr-defined]
    cls.load_model = load_model
    setattr(module, ASKED, with_interface)


def _before_setter(module: ModuleType) -> None:
    """The V2 runner asks in one function, which two modules know by name."""
    setter = getattr(module, SETTER, None)
    if setter is None or getattr(setter, "_draftsmith_shim", False):
        return

    @functools.wraps(setter)
    def with_interface(model: Any, spec_config: Any, *args: Any, **kwargs: Any) -> Any:
        ensure(model, spec_config.target_model_config, spec_config.target_parallel_config)
        return setter(model, spec_config, *args, **kwargs)

    with_interface._draftsmith_shim = True  # type: ignore[attr-defined]
    setattr(module, SETTER, with_interface)


def install() -> None:
    """Stand ready in the runners of this process."""
    for module, name in RUNNERS:

        def then(loaded: ModuleType, name: str = name) -> None:
            cls = getattr(loaded, name)
            if hasattr(cls, SETUP):
                _before_setup(cls)
            else:
                _before_inline(loaded, cls)

        then.__qualname__ = f"shim {module}"
        after_import(module, then)
    for module in SETTERS:
        after_import(module, _before_setter)
