"""A process in namespaces of its own, started by bubblewrap: no network, no files but the interpreter's, no rights.

The kernel does not count the processes of root, whatever name root has inside. So root, and only root, maps a second
user into the sandbox, as whom the program then runs; for anyone else their own user serves, under another name.
"""

import os
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import msgspec

from asyncrl.config.task import Limits
from asyncrl.errors import SandboxError
from asyncrl.sandbox.base import END_S, ENVIRONMENT, INTERPRETER, START_S, WAY_AROUND
from asyncrl.sandbox.pipes import memory_file, pipe, read_some
from asyncrl.sandbox.seccomp import seccomp_filter

MISSING = f"bubblewrap, which contains the model's code, is not installed: `apt-get install bubblewrap`, {WAY_AROUND}"
NOBODY = 65534
BECOME_NOBODY = [
    *("/usr/bin/setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"),
    *("--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"),
    *("--pdeathsig=KILL", "--"),  # a change of user forgets the signal that --die-with-parent asked for
]


class Bubblewrap:
    """Starts sandboxes; holds what is the same for all of them."""

    def __init__(self) -> None:
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxError(MISSING)
        self._program = program
        self._filter = seccomp_filter()
        self._files = list(_files())
        self._second_user = os.geteuid() == 0 and _is_mapped(NOBODY)

    @contextmanager
    def started(self, command: list[str], limits: Limits, stdin: int, stderr: int) -> Generator[int]:
        """Yield the output of `command`, the first process of a new sandbox; afterwards nothing in it is alive."""
        with memory_file(self._filter) as rules, pipe() as (told, tell), pipe() as (wait, go):
            arguments = [self._program, "--seccomp", str(rules), "--info-fd", str(tell.fileno())]
            arguments += [*_namespaces(), *self._files, *_own_files(limits.disk_bytes), *self._user(wait), *command]
            handed = (rules, tell.fileno(), wait.fileno())
            process = subprocess.Popen(
                arguments, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, pass_fds=handed, env={}
            )
            tell.close()
            wait.close()
            with process:
                assert process.stdout is not None
                with _first_process(process, told) as pid:
                    if pid is not None and self._second_user:
                        _map_second_user(pid)
                        go.write(b"+")
                    yield process.stdout.fileno()

    def _user(self, wait: FileIO) -> Iterable[str]:
        if not self._second_user:
            return ("--uid", str(NOBODY), "--gid", str(NOBODY), "--")
        rights = [word for right in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{right}")]
        return ("--userns-block-fd", str(wait.fileno()), *rights, "--", *BECOME_NOBODY)


def _namespaces() -> Iterable[str]:
    yield from ("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts")
    yield from ("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv")
    for name, value in ENVIRONMENT.items():
        yield from ("--setenv", name, value)


def _files() -> Iterable[str]:
    """Read-only: /usr, and the interpreter with its library but without the packages installed for it."""
    yield from ("--ro-bind", "/usr", "/usr")
    for top in map(Path, ("/lib", "/lib64")):
        if top.is_symlink():
            yield from ("--symlink", str(top.readlink()), str(top))
        elif top.is_dir():
            yield from ("--ro-bind", str(top), str(top))
    library = os.path.join(sys.base_prefix, "lib")
    for needed in (library, INTERPRETER):
        if not needed.startswith("/usr/"):
            # Left to bubblewrap, they would be as closed to others as a home directory is.
            for parent in reversed(Path(needed).parents[:-1]):
                yield from ("--perms", "0755", "--dir", str(parent))
            yield from ("--ro-bind", needed, needed)
    for packages in filter(os.path.isdir, site.getsitepackages([sys.base_prefix])):
        yield from ("--tmpfs", packages, "--remount-ro", packages)


def _own_files(disk_bytes: int) -> Iterable[str]:
    yield from ("--perms", "0755", "--dir", "/dev", "--dev-bind", "/dev/null", "/dev/null")
    yield from ("--perms", "1777", "--size", str(disk_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/")


def _is_mapped(user: int) -> bool:
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    return any(first <= user < first + count for first, count in ranges)


@contextmanager
def _first_process(bubblewrap: subprocess.Popen[bytes], told: FileIO) -> Generator[int | None]:
    """Its number on this side, or None if bubblewrap ended before there was one: then it says why in stderr.

    At the end it is killed, and so, by the kernel, is everything in its namespace. Bubblewrap waits for that.
    """
    pid = _announced(told)
    if pid is None:
        bubblewrap.kill()
        yield None
        return
    first = os.pidfd_open(pid)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(first, signal.SIGKILL)
        os.close(first)
        try:
            bubblewrap.wait(END_S)
        except subprocess.TimeoutExpired:
            bubblewrap.kill()
            raise SandboxError(f"process {pid} of a sandbox is alive {END_S:g} s after it was killed") from None


def _announced(told: FileIO) -> int | None:
    deadline = time.monotonic() + START_S
    notice = b""
    while b"}" not in notice:
        if not (more := read_some(told.fileno(), 4096, deadline)):
            return None
        notice += more
    return msgspec.json.decode(notice)["child-pid"]


def _map_second_user(pid: int) -> None:
    """Root inside, who sets the sandbox up, is root; the second user is nobody on both sides."""
    with suppress(FileNotFoundError):  # it has ended already
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
