"""What the user is told when something is wrong: one block of what, why and fix; never a traceback.

Inside the package, anything the user can put right is raised as `UserError`. The command line (cli/main.py)
renders it and exits with its code; library users catch it. Programming errors stay ordinary exceptions.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command (architecture.md, Words)."""

    OK = 0
    """Yes, or done."""
    NO = 1
    """The answer is no, or an assertion failed."""
    BAD_INPUT = 2
    """What the user gave is wrong."""
    UNKNOWN = 3
    """Could not tell."""


class UserError(Exception):
    """Something the user can put right.

    what: the fact, with the values and the file it was found in.
    why: why it matters, i.e. what would go wrong later.
    fix: what to do now.
    code: exit code of the command (bad input unless told).
    """

    def __init__(self, what: str, why: str = "", fix: str = "", code: Exit = Exit.BAD_INPUT) -> None:
        super().__init__(what)
        self.what, self.why, self.fix, self.code = what, why, fix, code

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"why: {self.why}")
        if self.fix:
            lines.append(f"fix: {self.fix}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str | int]:
        """The same block for `--json`: {"error": {"what", "why", "fix"}, "code"}."""
        return {"what": self.what, "why": self.why, "fix": self.fix, "code": int(self.code)}


def nearest(word: str, known: list[str] | tuple[str, ...], count: int = 1) -> list[str]:
    """The known words most like `word`, for "did you mean"; empty if none is near."""
    from difflib import get_close_matches

    return get_close_matches(word, list(known), n=count, cutoff=0.6)
