"""An installation on another host, read over SFTP: ssh://user@host:port/path.

Host keys must be known (~/.ssh/known_hosts and the system's): an unknown or changed key is refused, never asked about.
Keys and agents as ssh uses them, ~/.ssh/config for aliases; no passwords. fsspec's sftp file system carries the files.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from draftsmith.engine.reader.source import LARGEST, text_of, too_large
from draftsmith.errors import UserError

SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
TIMEOUT = 15.0
"""Seconds for connecting and for each answer."""


class SshSource:
    """Files below a folder of another host. One connection, opened at once; folder listings are kept."""

    def __init__(self, url: str) -> None:
        parsed = urlparse(url)
        if not parsed.hostname:
            raise UserError(f"{url} names no host", fix="write ssh://user@host/path/to/environment")
        self.url, self.root = url, unquote(parsed.path).rstrip("/") or "/"
        self.fs = _connect(parsed.hostname, parsed.port, unquote(parsed.username) if parsed.username else None)
        self._names: dict[str, list[str]] = {}
        if not self._exists(self.root):
            raise UserError(f"{self.root} does not exist on {parsed.hostname}", fix="give the folder's full path")

    @property
    def name(self) -> str:
        return self.url

    def beside(self, path: str) -> SshSource:
        """Another folder of the same host, over the same connection."""
        other = copy(self)
        other.root, other._names = path.rstrip("/") or "/", {}
        return other

    def _at(self, rel: str) -> str:
        return f"{self.root.rstrip('/')}/{rel}" if rel else self.root

    def _exists(self, path: str) -> bool:
        try:
            self.fs.ftp.stat(path)
        except OSError:
            return False
        return True

    def read_bytes(self, rel: str) -> bytes:
        path = self._at(rel)
        try:
            size = int(self.fs.ftp.stat(path).st_size or 0)
        except OSError:
            raise FileNotFoundError(path) from None
        if size > LARGEST:
            raise too_large(self.name, rel, size)
        try:
            return bytes(self.fs.cat_file(path))
        except OSError as e:  # a folder, or no permission
            raise FileNotFoundError(f"{path}: {e}") from None

    def read(self, rel: str) -> str:
        return text_of(self.read_bytes(rel))

    def exists(self, rel: str) -> bool:
        return self._exists(self._at(rel))

    def names(self, rel: str) -> list[str]:
        path = self._at(rel.rstrip("/"))
        if path not in self._names:
            try:
                self._names[path] = sorted(self.fs.ftp.listdir(path))
            except OSError:
                self._names[path] = []
        return self._names[path]

    def path(self, rel: str) -> Path | None:
        return None


def _connect(host: str, port: int | None, user: str | None) -> Any:
    """fsspec's SFTP file system over a connection that refuses unknown host keys."""
    import paramiko
    from fsspec.implementations.sftp import SFTPFileSystem

    class Careful(SFTPFileSystem):
        """fsspec's own connect accepts any host key; this one only known ones."""

        cachable = False

        def _connect(self) -> None:
            client = paramiko.SSHClient()
            client.load_system_host_keys()
            if Path(SYSTEM_KNOWN_HOSTS).exists():
                client.load_system_host_keys(SYSTEM_KNOWN_HOSTS)
            client.set_missing_host_key_policy(paramiko.RejectPolicy())
            client.connect(self.host, **self.ssh_kwargs)
            self.client, self.ftp = client, client.open_sftp()
            self.ftp.get_channel().settimeout(TIMEOUT)

    known = _ssh_config(host)
    options: dict[str, Any] = {
        "port": port or int(known.get("port", 22)),
        "username": user or known.get("user"),
        "timeout": TIMEOUT,
        "banner_timeout": TIMEOUT,
        "auth_timeout": TIMEOUT,
    }
    if "identityfile" in known:
        options["key_filename"] = [f for f in known["identityfile"] if Path(f).exists()]
    where = f"{options['username'] or ''}@{host}:{options['port']}".lstrip("@")
    try:
        return Careful(known.get("hostname", host), **options)
    except paramiko.BadHostKeyException as e:
        raise UserError(
            f"the host key of {where} is not the one that is known: {e}",
            "somebody may be listening in, or the host was set up anew",
            "find out which; then correct ~/.ssh/known_hosts",
        ) from None
    except paramiko.AuthenticationException as e:
        raise UserError(
            f"{where} refuses the login: {e}", fix=f"make sure that `ssh {where}` works without a password"
        ) from None
    except paramiko.SSHException as e:
        if "known_hosts" in str(e):
            raise UserError(
                f"the host key of {where} is not known",
                "an unknown host is never trusted by itself",
                "connect once with ssh and compare the key that it shows; it is then in ~/.ssh/known_hosts",
            ) from None
        raise UserError(f"{where} cannot be read over ssh: {e}", fix=f"try `ssh {where}`") from None
    except (OSError, EOFError) as e:
        raise UserError(
            f"{where} cannot be reached: {e}", fix="check the host's name, the port and the network"
        ) from None


def _ssh_config(host: str) -> dict[str, Any]:
    """What ~/.ssh/config says about a host (HostName, Port, User, IdentityFile)."""
    import paramiko

    file = Path("~/.ssh/config").expanduser()
    if not file.exists():
        return {}
    return dict(paramiko.SSHConfig.from_path(str(file)).lookup(host))
