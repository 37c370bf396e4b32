"""The process inside the sandbox: reads a job, then runs the program in a fork of itself for each input.

Its text is handed to a bare interpreter, so it imports nothing of ours, and of Python only what is there at once: the
modules `signal` and `typing` would take as long as everything else here. Output goes to a file, whose largest size the
kernel enforces, and from there to the parent in frames: exit code, length, bytes. The program has no way to the pipe.
"""

import atexit
import marshal
import os
import resource
import sys

CONTAINED = os.getpid() == 1
"""In a process namespace of its own. Elsewhere, kill(-1) would end everything its user runs."""
SIGKILL = 9


def main() -> None:
    with open(0, "rb", closefd=False) as job:
        program, inputs, limits = marshal.load(job)
    frames = os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    limit_all(limits)
    given, written = scratch("given"), scratch("written")
    os.write(frames, b"+")
    for stdin, args, call in inputs:
        refill(given, stdin.encode())
        os.truncate(written, 0)
        if not (pid := os.fork()):
            os.close(frames)
            os.dup2(given, 0)
            os.dup2(written, 1)
            limit_one(limits)
            os._exit(use(program, args, call))
        _, status = os.waitpid(pid, 0)
        if CONTAINED:
            end_others()
        data = os.pread(written, limits["output_bytes"], 0)
        code = os.waitstatus_to_exitcode(status)
        send(frames, code.to_bytes(4, "little", signed=True) + len(data).to_bytes(4, "little") + data)


def use(program: str, args: tuple[object, ...], call: str) -> int:
    """Run it and end it as the interpreter would, which takes longer as it also takes itself apart."""
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.argv = ["program.py", *([] if call else map(str, args))]
    code = 0
    try:
        execute(program, args, call)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # whatever it raises is its own failure, and nobody reads the traceback
        code = 1
    try:
        if "threading" in sys.modules:
            vars(sys.modules["threading"])["_shutdown"]()
        vars(atexit)["_run_exitfuncs"]()
        sys.stdout.flush()
    except BaseException:
        code = code or 1
    return code & 0xFF


def execute(program: str, args: tuple[object, ...], call: str) -> None:
    name = "program" if call else "__main__"
    module = sys.modules[name] = type(sys)(name)
    result = os.dup(1)
    if call:  # what it prints is not what it returns
        os.dup2(2, 1)
    exec(compile(program, "program.py", "exec"), module.__dict__)
    if call:
        owner, _, function = call.rpartition(".")
        value = getattr(getattr(module, owner)() if owner else module, function)(*args)
        import json  # not at the top, as only functions have to pay for it

        send(result, json.dumps(value, allow_nan=False).encode())


def limit_all(limits: dict[str, int]) -> None:
    fix(resource.RLIMIT_CORE, 0)
    fix(resource.RLIMIT_NOFILE, 64)
    fix(resource.RLIMIT_AS, limits["memory_bytes"])
    if CONTAINED:  # elsewhere it would count all that this user runs
        fix(resource.RLIMIT_NPROC, limits["processes"] + 1)


def limit_one(limits: dict[str, int]) -> None:
    fix(resource.RLIMIT_CPU, limits["cpu_s"])
    fix(resource.RLIMIT_FSIZE, limits["output_bytes"])


def fix(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def scratch(name: str) -> int:
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    os.unlink(name)
    return descriptor


def refill(descriptor: int, data: bytes) -> None:
    os.truncate(descriptor, 0)
    send(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)


def send(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def end_others() -> None:
    """Whatever the program left running must not write into the next output."""
    try:
        os.kill(-1, SIGKILL)
        while True:
            os.wait()
    except (ProcessLookupError, ChildProcessError):
        pass


if __name__ == "__main__":
    main()
    os._exit(0)
