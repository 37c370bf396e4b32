"""Programs that try to get out, or to take all there is. What they did is looked for from the outside.

Where an attack leaves a trace, the same program is run uncontained first: it succeeds, so the test can fail.
"""

import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from asyncrl.config.task import Limits
from asyncrl.sandbox.base import Input, Output
from asyncrl.sandbox.sandbox import Sandbox
from tests.support.sandbox_host import Watch, alive, descendants, processes_called, wait_until

DEFAULT = Limits()
QUICK = Limits(wall_s=2.0, cpu_s=1)


def run(sandbox: Sandbox, program: str, *args: object, limits: Limits = DEFAULT, times: int = 1) -> list[Output]:
    return list(sandbox.run(program, [Input(args=tuple(map(str, args)))] * times, limits))


def said(sandbox: Sandbox, program: str, *args: object) -> str:
    """By a program that came to its end."""
    (output,) = run(sandbox, program, *args)
    assert output.exit_code == 0
    return output.data.decode()


READ = """
import os, sys
for path in sys.argv[1:]:
    for way in (path, "/tmp/../.." + path, "/proc/1/root" + path, "/proc/self/cwd/../.." + path):
        try: print(open(way).read())
        except OSError: pass
    try:
        os.symlink(path, "link")
        print(open("link").read())
    except OSError: pass
print(os.environ)
"""


def test_neither_token_nor_home_nor_environment_can_be_read(
    sandbox: Sandbox, uncontained: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = uuid.uuid4().hex
    monkeypatch.setenv("HF_TOKEN", secret)
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text(secret)
    assert secret in said(uncontained, READ, token)
    seen = said(sandbox, READ, token, Path.home() / ".bashrc", Path.home() / ".profile", "/etc/passwd", "/etc/shadow")
    assert secret not in seen
    assert "root:" not in seen
    assert len(seen.splitlines()) == 1  # nothing but its environment


def test_only_the_interpreter_is_visible(sandbox: Sandbox) -> None:
    walk = "import os\nfor top, _, files in os.walk('/'):\n    for file in files: print(os.path.join(top, file))"
    (output,) = run(sandbox, walk, limits=Limits(output_bytes=64 << 20, cpu_s=10, wall_s=60))
    allowed = ("/usr/", os.path.join(sys.base_prefix, "lib"), os.path.realpath(sys.executable), "/lib", "/dev/null")
    paths = output.data.decode(errors="replace").splitlines()
    assert len(paths) > 100
    assert not [path for path in paths if not path.startswith(allowed)]
    assert not [path for path in paths if "-packages/" in path and path.startswith(sys.base_prefix)]


WRITE = """
import os, sys
for path in sys.argv[1:]:
    for act in (lambda: open(path, "w").write("x"), lambda: os.mkdir(path), lambda: os.symlink("/", path)):
        try: act()
        except OSError: pass
"""


def test_nothing_outside_can_be_written(sandbox: Sandbox, uncontained: Sandbox, tmp_path: Path) -> None:
    name = f"asyncrl-{uuid.uuid4().hex}"
    folders = [tmp_path, "/", "/tmp", "/usr", "/usr/bin", "/dev", "/dev/shm", "/var/tmp", "/root", sys.base_prefix]
    places = [Path(folder) / name for folder in [*folders, Path(sys.base_prefix) / "lib", Path.home()]]
    said(uncontained, WRITE, places[0])
    assert places[0].exists()
    places[0].unlink()
    said(sandbox, WRITE, *places)
    assert not [place for place in places if os.path.lexists(place)]


CONNECT = """
import socket, sys
port, path, abstract = int(sys.argv[1]), sys.argv[2], "\\0" + sys.argv[3]
for family, address in ((2, ("127.0.0.1", port)), (2, ("0.0.0.0", port)), (1, path), (1, abstract)):
    try: socket.socket(family).connect(address)
    except OSError: pass
"""


def test_a_live_listener_hears_nothing(sandbox: Sandbox, uncontained: Sandbox, tmp_path: Path) -> None:
    path, abstract = str(tmp_path / "socket"), uuid.uuid4().hex
    with (
        socket.create_server(("127.0.0.1", 0)) as inet,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as unnamed,
    ):
        named.bind(path)
        unnamed.bind("\0" + abstract)
        listeners = (inet, named, unnamed)
        for listener in listeners:
            listener.listen()
            listener.setblocking(False)
        for who, callers in ((uncontained, 1), (sandbox, 0)):
            said(who, CONNECT, inet.getsockname()[1], path, abstract)
            assert [min(_callers(listener), 1) for listener in listeners] == [callers] * 3


def _callers(listener: socket.socket) -> int:
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_no_other_kind_of_socket_can_be_made(sandbox: Sandbox) -> None:
    """A virtual machine's socket to its host (40) is in no network namespace; nor are others of the kernel's."""
    program = """
import socket
for family in range(46):
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(family, kind)
            print(family, end=" ")
            break
        except OSError: pass
"""
    assert set(said(sandbox, program).split()) <= {"1", "2", "10"}


FORK = """
import os, time
while True:
    try: os.fork()
    except OSError: pass
"""


def test_a_fork_bomb_stays_small_and_is_gone(sandbox: Sandbox) -> None:
    with Watch() as watch:
        assert run(sandbox, FORK, limits=QUICK) in ([], [Output(-9, b"")])
    assert 3 < watch.processes <= QUICK.processes + 2  # bubblewrap and our own process inside
    assert not watch.left


def test_threads_count_too(sandbox: Sandbox) -> None:
    program = """
import threading, time
for count in range(1000):
    try: threading.Thread(target=time.sleep, args=(0.2,), daemon=True).start()
    except RuntimeError: break
print(count)
"""
    assert int(said(sandbox, program)) < Limits().processes


MEMORY = """
import os
hoard = []
for _ in range(3): os.fork()
while True:
    try: hoard.append(bytearray(1 << 20))
    except MemoryError: pass
"""


def test_a_memory_bomb_is_bounded(sandbox: Sandbox) -> None:
    limits = Limits(wall_s=3.0, cpu_s=1, memory_bytes=96 << 20)
    with Watch() as watch:
        run(sandbox, MEMORY, limits=limits)
    assert 96 << 20 < watch.resident_bytes < (limits.processes + 1) * limits.memory_bytes
    assert not watch.left


@pytest.mark.parametrize(
    "take",
    [
        "file = os.open(str(count), os.O_CREAT | os.O_WRONLY); os.write(file, bytes(1 << 20)); os.close(file)",
        "os.write(os.memfd_create('x'), bytes(1 << 20))",
        "assert libc.shmget(0, 1 << 20, 0o1600) >= 0",
        "os.truncate(1, 1 << 31)",
    ],
    ids=["files", "memfd", "shared memory", "sparse output"],
)
def test_memory_that_is_no_address_space_is_bounded_too(sandbox: Sandbox, take: str) -> None:
    program = f"""
import ctypes, os
libc = ctypes.CDLL(None)
for count in range(1000):
    try: {take}
    except (OSError, AssertionError): break
for file in os.listdir(): os.truncate(file, 0)  # there is room for the answer again
print(count)
"""
    assert int(said(sandbox, program)) <= Limits().disk_bytes >> 20


FLOOD = """
import sys
from asyncrl.config.task import Limits
from asyncrl.sandbox.base import Input
from asyncrl.sandbox.sandbox import Sandbox
import resource
sandbox = Sandbox()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for target in (1, 2):
    program = f'''
import os
for _ in range(1024):
    try: os.write({target}, bytes(1 << 20))
    except OSError: pass
'''
    print(*(len(output.data) for output in sandbox.run(program, [Input()], Limits())))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.usefixtures("sandbox")
def test_a_gibibyte_of_output_costs_the_parent_a_few_mebibytes() -> None:
    """In a process of its own, as only its highest use of memory can be known."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    flood = subprocess.run([sys.executable, "-c", FLOOD], env=environment, capture_output=True, text=True, check=True)
    stdout_bytes, stderr_bytes, grown_kib = map(int, flood.stdout.split())
    assert stdout_bytes == Limits().output_bytes
    assert stderr_bytes == 0
    assert grown_kib < 16 << 10


def test_the_frames_cannot_be_forged(sandbox: Sandbox) -> None:
    program = """
import os
for descriptor in range(3, 64):
    try: os.write(descriptor, b"\\0" * 64)
    except OSError: pass
os.ftruncate(1, 0)
print("mine", flush=True)
"""
    assert run(sandbox, program, times=3) == [Output(0, b"mine\n")] * 3


TRICKS = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
assert not os.path.exists("/proc") and not os.path.exists("/sys")
refused = 0
for call in (
    lambda: os.kill(1, signal.SIGKILL),       # ignored by the kernel: it is the first process
    lambda: os.setuid(0), lambda: os.setgroups([0]), lambda: os.chroot("/tmp"), lambda: os.nice(-5),
    lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)),
    lambda: os.link("/usr/bin/env", "env"),
    lambda: os.chmod("/usr/bin/env", 0o777),
):
    try: call()
    except OSError: refused += 1
for call in (
    lambda: libc.unshare(0x10000000),         # a user namespace, in which one is root
    lambda: libc.mount(b"proc", b"/tmp", b"proc", 0, None),
    lambda: libc.ptrace(16, 1, 0, 0),
    lambda: libc.umount2(b"/usr", 2),
    lambda: libc.syscall(425, 8, 0),          # io_uring_setup
    lambda: libc.syscall(435, 0, 0),          # clone3
    lambda: libc.clone(0, 0, 0x10000011, 0),
):
    refused += call() == -1
print(refused)
"""


def test_tricks_with_rights_mounts_and_the_first_process_are_refused(sandbox: Sandbox) -> None:
    outputs = run(sandbox, TRICKS, times=2)  # the second shows that the first process lives on
    assert outputs == [Output(0, b"14\n")] * 2


def test_killing_everything_in_reach_ends_only_oneself(sandbox: Sandbox) -> None:
    program = "import os\nprint('here', flush=True)\nos.fork()\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)"
    assert run(sandbox, program, times=2) == [Output(-9, b"here\n")] * 2


DAEMON = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execv("/usr/bin/sleep", ["sleep", sys.argv[1]])
    os._exit(0)
time.sleep(1000)
"""


def unique_sleep() -> str:
    """Seconds that no one else sleeps, to be found by in the list of processes."""
    return f"1000.{uuid.uuid4().int % 10**12:012}"


def test_no_orphan_outlives_the_wall_clock(sandbox: Sandbox) -> None:
    marker = unique_sleep()
    with Watch() as watch:
        assert run(sandbox, DAEMON, marker, limits=QUICK) == []
    assert f"sleep {marker}" in watch.commands
    assert not watch.left
    assert not processes_called(f"sleep {marker}")


PARENT = """
import sys
from asyncrl.config.task import Limits
from asyncrl.sandbox.base import Input
from asyncrl.sandbox.sandbox import Sandbox
list(Sandbox().run(sys.argv[1], [Input(args=(sys.argv[2],))], Limits(wall_s=600)))
"""


@pytest.mark.usefixtures("sandbox")
def test_the_sandbox_dies_with_its_parent() -> None:
    marker = unique_sleep()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", PARENT, DAEMON, marker], env=environment) as parent:
        wait_until(lambda: bool(processes_called(f"sleep {marker}")))
        inside = descendants(parent.pid)
        assert len(inside) >= 4
        parent.kill()
    wait_until(lambda: not processes_called(f"sleep {marker}"))
    wait_until(lambda: not any(alive(pid) for pid in inside))
