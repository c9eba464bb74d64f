"""Known faults of vLLM releases: where the source proves each one, and what mends it.

A fault is never assumed from a version: `find` reads the installed file and says on which line it is. draftsmith's
`check` warns from this table; the plugin mends the rows that have a mend.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

DEEPSEEK = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "KimiK25ForConditionalGeneration",
    "MistralLarge3ForCausalLM",
)
"""Architectures served by the classes of vllm/model_executor/models/deepseek_v2.py."""


@dataclass(frozen=True)
class Fault:
    """platform: "cpu" or "any". seen: releases it was seen or read in, as text. file: below the folder that holds
    `vllm/`. scope: dotted name of the function or class whose source is read ("" = the file). holds: texts that must
    all be there, in the normal form of `ast.unparse`; the first one is the evidence. lacks: texts that must all be
    absent. mend: name of the plugin's mend, or None. advice: what to do until it is mended. architectures: targets
    that it concerns, () = all. only: a further condition of target and drafter, by name ("" = none): aux_at_end (the aux
    ids hold the target's layer count), plain_latent_rope (latent attention with the default rope). spoils: when it
    lowers acceptance: "sampling" (temperature > 0), "always", "" (never: it is loud)."""

    id: str
    platform: str
    seen: str
    symptom: str
    file: str
    scope: str
    holds: tuple[str, ...]
    lacks: tuple[str, ...]
    mend: str | None
    advice: str
    architectures: tuple[str, ...] = ()
    only: str = ""
    spoils: str = ""


@dataclass(frozen=True)
class Found:
    """A fault proved present: line is 1-based, text the line itself."""

    fault: Fault
    file: str
    line: int
    text: str


FAULTS: tuple[Fault, ...] = (
    Fault(
        id="cpu-expand-lost",
        platform="cpu",
        seen="0.20.0 to 0.31.0 read, 0.32.0 run",
        symptom="at temperature > 0 every speculative method writes meaningless text and accepts next to nothing: "
        "temperature, top_k and top_p of the draft positions are uninitialised memory",
        file="vllm/utils/cpu_triton_utils.py",
        scope="_expand_kernel_impl",
        holds=("_ensure_int64(output)",),
        lacks=("output.copy_(", "output[:", "output[0:"),
        mend="expand_kernel",
        advice="serve through draftsmith (it injects the plugin draftsmith_vllm), or keep the temperature at 0",
        spoils="sampling",
    ),
    Fault(
        id="cpu-no-speculation",
        platform="cpu",
        seen="0.9.1 to 0.19.1 read",
        symptom="the CPU build stops with 'spec decode is not supported.' before the model is loaded",
        file="vllm/v1/worker/cpu_model_runner.py",
        scope="CPUModelRunner.__init__",
        holds=("assert self.speculative_config is None",),
        lacks=(),
        mend=None,
        advice="EAGLE-3 on the CPU needs vLLM 0.22 or later",
    ),
    Fault(
        id="cpu-eagle3-not-set-up",
        platform="cpu",
        seen="0.20.0 to 0.21.0 read",
        symptom="the CPU runner never asks the target for its aux states, so an EAGLE-3 drafter gets none",
        file="vllm/v1/worker/cpu_model_runner.py",
        scope="CPUModelRunner.load_model",
        holds=("self.drafter.load_model(self.model)",),
        lacks=("_setup_eagle3_aux_hidden_state_outputs",),
        mend=None,
        advice="EAGLE-3 on the CPU needs vLLM 0.22 or later",
    ),
    Fault(
        id="deepseek-last-boundary",
        platform="any",
        seen="0.18.0 to 0.24.0 read",
        symptom="aux layer id n (after the last layer) is never captured by this class: the drafter gets one state "
        "too few and the first request fails",
        file="vllm/model_executor/models/deepseek_v2.py",
        scope="DeepseekV2Model.forward",
        holds=("if idx in self.aux_hidden_state_layers",),
        lacks=("_maybe_add_hidden_state", "if self.end_layer in self.aux_hidden_state_layers"),
        mend=None,
        advice="use aux layers below the layer count, or vLLM 0.25 or later",  # vllm#46788
        architectures=DEEPSEEK,
        only="aux_at_end",
    ),
    Fault(
        id="cpu-seed-in-parts",
        platform="cpu",
        seen="0.11.0 to 0.31.0 read, 0.32.0 run",
        symptom="a request with a seed whose prompt is prefilled in parts kills the worker: its generator is wound back "
        "by set_offset, which a generator of the CPU refuses",
        file="vllm/v1/worker/gpu_model_runner.py",
        scope="GPUModelRunner._bookkeeping_sync",
        holds=("gen.set_offset(gen.get_offset() - 4)",),
        lacks=("device.type",),
        mend="rewind_seed",
        advice="serve through draftsmith (it injects the plugin draftsmith_vllm), or send no seed with long prompts",
    ),
    Fault(
        id="cpu-latent-rope",
        platform="cpu",
        seen="0.14.0 to 0.31.0 read, 0.32.0 run",
        symptom="latent attention (DeepSeek, Kimi) with the default rope is rotated wrongly: the CPU kernel takes a query "
        "[tokens, heads, size] for one of a single head, so target and drafter compute something else than on a GPU",
        file="vllm/model_executor/layers/rotary_embedding/base.py",
        scope="RotaryEmbedding.forward_cpu",
        holds=("ops.rotary_embedding(positions, query, key, self.head_size", "from vllm import _custom_ops as ops"),
        lacks=("forward_native", "query.dim()", "query.ndim", "query.view", "query.reshape"),
        mend="latent_rope",
        advice="serve through draftsmith (it injects the plugin draftsmith_vllm), or measure on a GPU",
        only="plain_latent_rope",
        spoils="always",
    ),
    Fault(
        id="cpu-numba-at-start",
        platform="cpu",
        seen="0.31.0 read, 0.32.0 run",
        symptom="the worker dies while it starts where numba was imported before it (the processor of Kimi-K2.5 does "
        "so): a search through all modules takes llvmlite's library object for one with attributes",
        file="vllm/triton_utils/dispatcher.py",
        scope="_rebind_kernels",
        holds=("lookup(vars(value).get('kernel'))",),
        lacks=("isinstance(vars(value)", "getattr(vars(value)", "llvmlite"),
        mend="rebind_kernels",
        advice="serve through draftsmith (it injects the plugin draftsmith_vllm)",
        architectures=("KimiK25ForConditionalGeneration",),
    ),
    Fault(
        id="cpu-sigmoid-routing",
        platform="cpu",
        seen="0.30.0 and 0.31.0 read, 0.32.0 run",
        symptom="experts that are chosen by sigmoid scores without groups (MiniMax-M2) stop the worker in its profile "
        "run with an empty AssertionError: the CPU's router knows them in groups only",
        file="vllm/model_executor/layers/fused_moe/router/cpu_router.py",
        scope="CPURouter._compute_routing",
        holds=("assert self.scoring_func == 'softmax'", "return _grouped_topk("),
        lacks=("self.scoring_func == 'sigmoid'",),
        mend="sigmoid_routing",
        advice="serve through draftsmith (it injects the plugin draftsmith_vllm), or use a GPU",
        architectures=("MiniMaxM2ForCausalLM",),
    ),
)


def _scope(tree: ast.Module, dotted: str) -> ast.AST | None:
    node: ast.AST = tree
    for name in filter(None, dotted.split(".")):
        for child in getattr(node, "body", []):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == name:
                node = child
                break
        else:
            return None
    return node


def _code(node: ast.AST) -> str:
    """Source in normal form, without docstrings (they may speak of what the code does not do)."""
    for part in ast.walk(node):
        body = getattr(part, "body", None)
        if (
            isinstance(body, list)
            and len(body) > 1
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            del body[0]
    return ast.unparse(node)


def _line_of(node: ast.AST, text: str) -> int:
    """Line of the smallest part of `node` whose normal form holds `text`."""
    best, size = getattr(node, "lineno", 1), 1 << 30
    for part in ast.walk(node):
        if not isinstance(part, (ast.stmt, ast.expr)):
            continue
        form = ast.unparse(part)
        if text in form and len(form) < size:
            best, size = part.lineno, len(form)
    return best


def _cut(source: str, dotted: str) -> ast.AST | None:
    """The scope, parsed without the rest of its file (a runner has 7,000 lines); None where it cannot be cut out."""
    start, end, indent = 0, len(source), -1
    for name in filter(None, dotted.split(".")):
        head = re.compile(rf"^([ \t]*)(?:async def|def|class) {re.escape(name)}\b", re.MULTILINE).search(
            source, start, end
        )
        if head is None or len(head.group(1)) <= indent:
            return None
        start, indent = head.start(), len(head.group(1))
        # The scope ends before the next line that is indented no deeper; a signature's closing bracket may stand there.
        tail = re.compile(rf"^[ \t]{{0,{indent}}}[^ \t\n#)\]]", re.MULTILINE).search(source, head.end(), end)
        end = tail.start() if tail else end
    if indent < 0:
        return None
    try:
        # Empty lines before it give the nodes their true lines.
        tree = ast.parse("\n" * source.count("\n", 0, start) + dedent(source[start:end]))
    except (SyntaxError, ValueError):
        return None
    return tree.body[0] if len(tree.body) == 1 else None


def scope_in(source: str, dotted: str) -> ast.AST | None:
    """The function or class of this dotted name ("" = the file), or None where it is not there or cannot be parsed."""
    node = _cut(source, dotted)
    if node is not None:
        return node
    try:
        return _scope(ast.parse(source), dotted)
    except (SyntaxError, ValueError):
        return None


def find_in(fault: Fault, source: str) -> Found | None:
    """The fault in the text of its file, or None where the text does not prove it (or cannot be parsed)."""
    node = scope_in(source, fault.scope)
    if node is None:
        return None
    code = _code(node)
    if any(text not in code for text in fault.holds) or any(text in code for text in fault.lacks):
        return None
    line = _line_of(node, fault.holds[0]) if fault.holds else getattr(node, "lineno", 1)
    lines = source.splitlines()
    return Found(fault, fault.file, line, lines[line - 1].strip() if line <= len(lines) else "")


def find_all(read: Callable[[str], str | None], faults: tuple[Fault, ...] = FAULTS) -> list[Found]:
    """Every fault that the source proves; `read(file)` gives a file's text, or None where there is none."""
    found = []
    for fault in faults:
        text = read(fault.file)
        hit = find_in(fault, text) if text is not None else None
        if hit is not None:
            found.append(hit)
    return found


def find_in_site(site: Path, faults: tuple[Fault, ...] = FAULTS) -> list[Found]:
    """`find_all` in the folder that holds `vllm/`."""

    def read(file: str) -> str | None:
        try:
            return (site / file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    return find_all(read, faults)
