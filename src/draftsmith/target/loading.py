"""Loading a target with transformers shows its bar to people, and leaves logs without it."""

from __future__ import annotations

import sys


def bars_for_people_only() -> None:
    """Turn transformers' progress bars off where standard error is no terminal: a log keeps every state of a bar."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
