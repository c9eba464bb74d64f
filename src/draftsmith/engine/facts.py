"""What `draftsmith engine show` prints about an installed engine; read from its files."""

from __future__ import annotations

from typing import Any

from draftsmith.engine.find import Engine

PLUGIN = "draftsmith-vllm"


def plugin_state(engine: Engine) -> str:
    """ "installed <version>", "injected by path when draftsmith serves", or why it cannot be."""
    if engine.name != "vllm":
        return f"none (the plugin is for vLLM, this is {engine.name})"
    installed = engine.dist_version(PLUGIN)
    if installed:
        return f"installed {installed}"
    from draftsmith.engine.inject import plugin_problem

    problem = plugin_problem(engine.package.parent)
    return f"cannot be injected: {problem}" if problem else "injected by path when draftsmith serves"


def python_version(engine: Engine) -> str | None:
    """ "3.11", from the name of the folder that holds site-packages."""
    name = engine.site.parent.name
    return name.removeprefix("python") if name.startswith("python3") else None


def describe(engine: Engine) -> dict[str, Any]:
    return {
        "engine": engine.name,
        "version": engine.version,
        "distribution": engine.distribution,
        "interpreter": str(engine.python) if engine.python else None,
        "python": python_version(engine),
        "site": str(engine.site),
        "platform": engine.platform,
        "torch": engine.torch,
        "transformers": engine.dist_version("transformers"),
        "triton": engine.dist_version("triton") or engine.dist_version("triton-cpu"),
        "plugin": plugin_state(engine),
        "managed": engine.managed,
    }
