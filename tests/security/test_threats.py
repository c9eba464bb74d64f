"""Every threat of docs/security.md, twice: with its defence the attack fails, without it the attack succeeds."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import threats_endpoint  # noqa: F401  (each adds its threats)
import threats_folder  # noqa: F401
import threats_machine  # noqa: F401
import threats_secrets  # noqa: F401
import threats_shown  # noqa: F401
from threat import THREATS, HarmError, Threat

PAGE = Path(__file__).parent.parent.parent / "docs" / "security.md"
EACH = pytest.mark.parametrize("t", sorted(THREATS, key=lambda t: t.id), ids=lambda t: t.id)


def needs_ssh(t: Threat) -> None:
    if t.id in ("T38", "T39") and shutil.which("ssh") is None:
        pytest.skip("OpenSSH is not installed")


@EACH
def test_the_attack_fails(t: Threat, tmp_path: Path) -> None:
    needs_ssh(t)
    t.attack(tmp_path)


@EACH
def test_without_its_defence_the_attack_succeeds(t: Threat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_ssh(t)
    t.off(monkeypatch)
    with pytest.raises(HarmError):
        t.attack(tmp_path)


def test_the_page_lists_just_these_threats() -> None:
    listed = re.findall(r"^\| (T\d+) \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert listed == [(t.id, t.title) for t in sorted(THREATS, key=lambda t: t.id)]
    assert len(listed) >= 20 and len({t.id for t in THREATS}) == len(THREATS)
