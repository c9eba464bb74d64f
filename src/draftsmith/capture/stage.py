"""The capture stage: prompts in, the target's own answers out, as rows of token ids; and the contract's first fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from draftsmith.capture.ask import Settings
from draftsmith.capture.imported import import_rows
from draftsmith.capture.plan import Plan, plan_prompts, summary
from draftsmith.capture.prompts import Rules
from draftsmith.capture.rows import iter_rows
from draftsmith.capture.run import Servers, capture_rows
from draftsmith.capture.sources import open_source
from draftsmith.contract import Contract
from draftsmith.engine.ensure import REFERENCE
from draftsmith.errors import UserError
from draftsmith.recipe import CaptureSection
from draftsmith.secrets import secret
from draftsmith.stage import Run, Stage
from draftsmith.target.config import config_hash, load_config, target_facts
from draftsmith.target.resolve import resolve_target
from draftsmith.target.tokenizer import TargetTokenizer, chat_template, chat_template_hash, tokenizer_hash

ROWS = "rows"
"""The folder of parts inside the stage's folder."""


def _folder(run: Run) -> Path:
    return resolve_target(run.recipe.target, weights=not run.recipe.capture.endpoints)


def inputs(run: Run) -> dict[str, str]:
    """Hashes of the target's config, tokenizer and template, and of every prompt source."""
    folder, section = _folder(run), run.recipe.capture
    return {
        "target_config": config_hash(load_config(folder)),
        "tokenizer": tokenizer_hash(folder),
        "chat_template": chat_template_hash(folder) or "none",
        **{f"prompts {s}": open_source(s).hash() for s in section.prompts},
        **{f"held out {s}": open_source(s).hash() for s in section.held_out},
    }


def first_contract(run: Run, folder: Path) -> Contract:
    """What is decided before the first answer: the target, its tokenizer and template, the thinking mode."""
    return Contract(
        target=target_facts(folder, run.recipe.target.model),
        tokenizer_hash=tokenizer_hash(folder),
        chat_template_hash=chat_template_hash(folder),
        thinking=run.recipe.capture.thinking,
    )


def rules_of(section: CaptureSection) -> Rules:
    return Rules(section.assistant_role, section.drop_images, section.system)


def settings_of(section: CaptureSection, seeded: bool = True) -> Settings:
    return Settings(
        mode=section.mode,
        thinking=section.thinking,
        temperatures=tuple(section.temperatures) or (section.temperature,),
        top_p=section.top_p,
        max_tokens=section.max_tokens,
        max_prompt_tokens=section.max_prompt_tokens,
        seed=section.seed if seeded else None,
    )


def tokenizer_of(run: Run, folder: Path) -> TargetTokenizer | None:
    """The target's tokenizer; None where it cannot be loaded here and a server will render. UserError where the mode
    needs a chat template that the target lacks."""
    section = run.recipe.capture
    if section.mode == "chat" and chat_template(folder) is None and not _remote_template(folder):
        TargetTokenizer(_NoTemplate(), folder).require_template()
    try:
        tokenizer = TargetTokenizer.load(folder, run.recipe.target.trust_remote_code)
    except UserError as e:
        run.ui.warn(f"{e.what}; the server's own /tokenize is compared with instead")
        return None
    if section.mode == "chat":
        tokenizer.require_template()
    return tokenizer


class _NoTemplate:
    chat_template = None


def _remote_template(folder: Path) -> bool:
    """A template may live in the tokenizer's own Python code only."""
    return any(folder.glob("tokenization_*.py"))


def plan_of(run: Run) -> Plan:
    """Which prompts are answered; says what was left out and why."""
    section = run.recipe.capture
    plan = plan_prompts(section.prompts, section.held_out, section.seed, rules_of(section), section.max_dropped)
    for source in plan.sources:
        if source.note:
            run.ui.note(source.note)
    run.ui.note(f"prompts: {summary(plan.total, plan.dropped)}")
    return plan


def work(run: Run, folder: Path) -> dict[str, Any]:
    """Plan, check, start the engine where no endpoint is given, ask, store."""
    section = run.recipe.capture
    target = _folder(run)
    contract = first_contract(run, target)
    tokenizer = tokenizer_of(run, target)
    _require_servable(run, target)
    plan = plan_of(run)
    contract.save(folder)
    if section.trust_answers:
        result = import_rows(plan, folder / ROWS, tokenizer, section.thinking, run.ui, section.max_dropped)
        contract.with_(data_hash=result["output_hash"]).save(folder)
        return result
    key, keeper = _api_key(section), None
    with ExitStack() as stack:
        if run.recipe.extract.passes == 1:
            server, keeper = _keeping(run, target, folder, contract, stack)
            servers = Servers([server.url], model=server.name, limit=section.concurrency, patience=10.0)
        elif section.endpoints:
            servers = Servers(
                section.endpoints, api_key=key, limit=section.concurrency, timeout=section.request_timeout
            )
        elif run.recipe.engine.path == REFERENCE:
            servers = _in_process(run, target, tokenizer)
        else:
            server = stack.enter_context(_engine(run, target, folder))
            servers = Servers([server.url], model=server.name, limit=section.concurrency, patience=10.0)
        result = capture_rows(
            plan,
            folder / ROWS,
            settings_of(section, seeded=bool(section.endpoints) or not _own_cpu_engine(run)),
            servers,
            tokenizer,
            run.ui,
            samples=section.samples,
            max_dropped=section.max_dropped,
            keeper=keeper,
        )
        if servers.urls:
            _leave_references(run, folder, servers)
    contract.with_(data_hash=result["output_hash"]).save(folder)
    return result


def _keeping(run: Run, target: Path, folder: Path, contract: Contract, stack: ExitStack) -> tuple[Any, Any]:
    """The engine with our states plugin, and what keeps the states (extract.passes: 1)."""
    from draftsmith.extract.one_pass import keeping, require_possible
    from draftsmith.extract.stage import with_layers
    from draftsmith.extract.wire import Wire

    require_possible(run)
    decided = with_layers(run, contract)
    wire = stack.enter_context(Wire(decided, folder))
    server = stack.enter_context(
        _engine(run, target, folder, wire.arguments(), wire.environment(run.recipe.engine.env))
    )
    return server, stack.enter_context(keeping(run, wire, decided, server.require_alive))


def _leave_references(run: Run, folder: Path, servers: Servers) -> None:
    """While a server is up: its most likely tokens on a few rows, for the extract stage's self-check."""
    from draftsmith.extract.self_check import FILE, leave_references

    count = run.recipe.extract.self_check_rows
    if count and not (folder / FILE).is_file():
        rows = iter_rows(folder)
        leave_references(folder, servers.urls[0], servers.model, servers.api_key, rows, count, run.ui)


def _require_servable(run: Run, target: Path) -> None:
    """Stop before the first answer where the engine would refuse a drafter for this target (exit code NO)."""
    from draftsmith.check.before import require_servable

    path = run.recipe.engine.path
    verdict = require_servable(target, None if path == REFERENCE else path)
    for row in verdict.checks:
        if row.status == "warn":
            run.ui.warn(row.found)


def _api_key(section: CaptureSection) -> str | None:
    if section.api_key_env is None:
        return None
    key = secret(section.api_key_env)
    if not key:
        raise UserError(
            f"the environment variable {section.api_key_env} is not set, nor is it in the keyring",
            "capture.api_key_env says that it holds the servers' key",
            f"export {section.api_key_env}=…",
        )
    return key


def _own_cpu_engine(run: Run) -> bool:
    """vLLM's CPU worker dies on a request with a seed whose prompt is prefilled in parts: gpu_model_runner.py calls
    `gen.set_offset`, which a CPU generator refuses (seen in 0.32.0). There, answers come from the engine's own stream."""
    from draftsmith.engine.find import find_engine

    path = run.recipe.engine.path
    return path != REFERENCE and find_engine(path).platform == "cpu"


def _in_process(run: Run, target: Path, tokenizer: TargetTokenizer | None) -> Servers:
    """The target in this process, for machines where no vLLM exists (engine.path: reference)."""
    from draftsmith.capture.local import LocalClient, LocalTarget

    if tokenizer is None:
        raise UserError(
            "the reference engine needs the target's tokenizer, which cannot be loaded here",
            "it renders the prompts itself",
            "set target.trust_remote_code if you trust the target's code, or capture from a server",
        )
    run.ui.note("the target answers in this process (plain transformers), as engine.path says")
    model = LocalTarget(target, run.recipe.target.trust_remote_code, run.recipe.engine.dtype)
    most = run.recipe.capture.concurrency
    return Servers(clients=[LocalClient(model, tokenizer, batch=most)], limit=most)


def _engine(
    run: Run, target: Path, folder: Path, args: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Any:
    """The engine's server for the plain target, with the recipe's settings; its log lies in the stage's folder."""
    from draftsmith.engine.find import find_engine
    from draftsmith.engine.server import Server, serve_section

    section = run.recipe.engine
    given = serve_section(section)
    given["args"], given["env"] = [*given["args"], *args], {**given["env"], **(env or {})}
    return Server(find_engine(section.path), target, log=folder / "engine.log", ui=run.ui, **given)


STAGE = Stage("capture", ("target", "engine", "capture"), inputs, work)
