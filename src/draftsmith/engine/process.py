"""Start a long-running command under the guard (process_guard.py) and stop it, leaving nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from draftsmith.errors import UserError

GUARD = Path(__file__).with_name("process_guard.py")


class Guarded:
    """A command under its guard; its output goes to `log` (appended).

    grace: seconds that the command has to end after SIGTERM before all below it is killed."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path, grace: float = 20.0) -> None:
        self.grace = grace
        log.parent.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, str(GUARD), str(log), str(grace), "--", *command],
            env=env | {"DRAFTSMITH_GUARD_PARENT": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches draftsmith alone, which then stops the engine in order
        )

    @property
    def pid(self) -> int:
        """The guard's process id; everything of the engine is below it."""
        return self.process.pid

    def exit_code(self) -> int | None:
        """The command's exit code (128 + signal for a killed one), None while it runs."""
        return self.process.poll()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(self.grace + 15)
        except subprocess.TimeoutExpired:
            from draftsmith.engine.process_guard import descendants

            for pid in [*descendants(self.pid), self.pid]:
                os.kill(pid, signal.SIGKILL)
            self.process.wait()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def require_free(port: int, host: str = "127.0.0.1") -> int:
    """`port` if it can be bound, else UserError."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise UserError(
                f"port {port} on {host} cannot be used: {e.strerror}",
                "another server listens there, and answers would come from it",
                "give another --port, or none and a free one is taken",
            ) from None
    return port
