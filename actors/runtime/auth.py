"""Access to Ray. One that we start has a fresh token and listens on this machine only; for others we need their token.

By itself Ray keeps its token, sockets and logs where every user of the machine can reach them, and listens on every
network. What is set here is read when ray is imported, so it is set before.
"""

import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.system import ownership, scratch_dirs

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's switch for machines that are no cluster: its address is 127.0.0.1, and it listens there alone."""
QUIET = {"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1", "RAY_task_events_report_interval_ms": "0"}
"""Without the stack that Ray prints at SIGTERM, and without its record of every call: nobody reads it, and the control
process keeps it in memory, which would grow with the run."""
LONGEST = 22
"""Characters of its parent directory: the path of a socket has at most 107, and what comes below takes 85 of them."""
ANSWER_S = 5.0


@contextmanager
def own_ray() -> Generator[Path, None, None]:
    """Environment and directory of a Ray that we start. The directory stays after a failure, for Ray's logs in it."""
    if "ray" in sys.modules and os.environ.get(MODE) != "token":
        raise ConfigError(
            "cluster=local: ray was imported before, when it reads whom it lets in; import it later, or set "
            f"{MODE}=token before Python starts"
        )
    tighten(_default_token())
    ownership.end(ownership.left_behind())
    home = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    directory = scratch_dirs.scratch_directory("", Path(home if len(home) <= LONGEST else "/tmp"))
    token, inside = directory / "auth_token", directory / "ray"  # Ray opens what it is given to everybody (0777)
    _write_private(token, _fresh_token())
    try:
        mark = {ownership.MARK: os.environ.get(ownership.MARK) or ownership.mark()}
        with _environment({MODE: "token", TOKEN_PATH: str(token), **LOOPBACK, **QUIET, **mark}, without=TOKEN):
            yield inside
    except BaseException:
        scratch_dirs.keep(directory)
        raise
    finally:
        token.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def existing_ray(address: str) -> Generator[None, None, None]:
    """Environment to join an existing Ray, with its token. RAY_AUTH_MODE=disabled says that it has none."""
    tighten(_default_token())
    if os.environ.get(MODE):
        yield
        return
    if not os.environ.get(TOKEN) and not _token_path().is_file():
        raise ConfigError(
            f"cluster={address}: there is no token for it here; copy the head node's ~/.ray/auth_token to "
            f"{_token_path()}, mode 0600. A Ray without tokens obeys everybody who reaches it: if this is one, say so "
            f"with {MODE}=disabled"
        )
    with _environment({MODE: "token"}):
        yield


def ensure_token(path: Path) -> None:
    """Write a token for a new cluster, readable by us alone; an existing one stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        _write_private(path, _fresh_token())
    tighten(path)


def check_reachable(address: str, gcs: str) -> None:
    """Raise ConfigError unless somebody listens there: Ray itself tries for a minute."""
    host, _, port = gcs.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise ConfigError(f"cluster={address}: no Ray answers at {gcs} ({error}); use cluster=local") from None


def refused(address: str) -> ConfigError:
    """The error for a Ray that rejects our token: what to do about it."""
    held = f"the one in {TOKEN}" if os.environ.get(TOKEN) else f"the one in {_token_path()}"
    ours = f"not {held}" if os.environ.get(MODE) == "token" else f"but {MODE}={os.environ.get(MODE)}"
    return ConfigError(
        f"cluster={address}: it wants its own token, {ours}; take ~/.ray/auth_token of its head node, mode 0600"
    )


def tighten(path: Path) -> None:
    """A token of ours that others can read, as Ray writes it, becomes ours alone."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        if found.st_uid == os.geteuid() and found.st_mode & 0o077 and not path.is_symlink():
            path.chmod(0o600)


@cache
def _fresh_token() -> str:
    """One for each process of ours: Ray remembers the first that it has read."""
    return secrets.token_hex(32)


def _default_token() -> Path:
    return Path.home() / ".ray" / "auth_token"


def _token_path() -> Path:
    return Path(os.environ.get(TOKEN_PATH) or _default_token())


def _write_private(path: Path, content: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)


@contextmanager
def _environment(values: Mapping[str, str], without: str = "") -> Generator[None, None, None]:
    before = {name: os.environ.get(name) for name in (*values, *filter(None, [without]))}
    os.environ.update(values)
    os.environ.pop(without, None)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
