"""Facts -> verdicts: what is wrong, and the command that mends it. Pure, so that every judgement can be tested."""

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
from packaging.specifiers import SpecifierSet

from asyncrl.observe.doctor.facts import Facts
from asyncrl.system import minimum_versions

Level = Literal["ok", "warning", "problem"]
MIB, GIB = 1 << 20, 1 << 30
ELSEWHERE = "asyncrl run root=/a/local/disk"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the output. A warning slows a run or ends some; a problem ends every one."""

    check: str
    level: Level
    found: str
    mend: str = ""
    """The command, where something is to be done."""


def judge(facts: Facts) -> list[Verdict]:
    return [verdict for check in CHECKS for verdict in check(facts)]


def _ok(check: str, found: str) -> Verdict:
    return Verdict(check=check, level="ok", found=found)


def _warning(check: str, found: str, mend: str) -> Verdict:
    return Verdict(check=check, level="warning", found=found, mend=mend)


def _problem(check: str, found: str, mend: str) -> Verdict:
    return Verdict(check=check, level="problem", found=found, mend=mend)


def python(facts: Facts) -> Iterator[Verdict]:
    version = ".".join(map(str, facts.python))
    if facts.python < (3, 11):
        yield _problem("python", f"{version} is too old, 3.11 is the oldest", "make PYTHON=python3.12 install")
    else:
        yield _ok("python", version)


def packages(facts: Facts) -> Iterator[Verdict]:
    """One line for each that is wrong, and one for all the others."""
    fine: list[str] = []
    for name, wanted in facts.requirements.items():
        found, floor = facts.packages.get(name), minimum_versions.MINIMUM_VERSIONS.get(name)
        mend = f"pip install '{name}{wanted}'"
        if found is None:
            yield _problem(name, "is not installed", mend)
        elif floor is not None and minimum_versions.release(found) < minimum_versions.release(floor.oldest):
            yield _problem(name, f"{found} is too old to be safe: {floor.why}", mend)
        elif not _within(found, wanted):
            yield _warning(name, f"{found} is outside of what is tested, {wanted}", mend)
        else:
            fine.append(f"{name} {found}")
    yield _ok("packages", ", ".join(fine) or "asyncrl is not installed here, so its requirements are not known")


def _within(found: str, wanted: str) -> bool:
    """A pre-release counts as its release: 2.62rc1 is not below 2.62."""
    numbers = minimum_versions.release(found)
    return bool(numbers) and SpecifierSet(wanted).contains(".".join(map(str, numbers)))


def vllm(facts: Facts) -> Iterator[Verdict]:
    if facts.vllm is None and not facts.gpus:
        yield _ok("vllm", "not installed; engine=native does without")
    elif minimum_versions.vllm_problem(facts.vllm) is None:
        yield _ok("vllm", f"{facts.vllm}")
    else:
        found = facts.vllm or "not installed"
        yield _warning(
            "vllm", f"{found}, engine=vllm needs {minimum_versions.VLLM_RANGE}", "pip install 'asyncrl[vllm]'"
        )


def transformers(facts: Facts) -> Iterator[Verdict]:
    missing = (
        "not installed; engine=vllm and engine=transformers need it, and models that our own decoder does not know"
    )
    yield _ok("transformers", facts.packages.get("transformers") or missing)


def gpu(facts: Facts) -> Iterator[Verdict]:
    if not facts.gpu_devices:
        yield _ok("gpu", "none: everything runs on the CPU")
        return
    if not facts.gpus:
        yield _problem("gpu", f"{facts.gpu_devices} devices, but their driver does not answer", "nvidia-smi")
        return
    first = facts.gpus[0]
    cards = f"{len(facts.gpus)} x {first.name}, {first.memory / GIB:.0f} GiB, driver {first.driver}"
    if facts.cuda is None or facts.cuda.works:
        yield _ok("gpu", cards)
    elif not facts.cuda.torch:
        yield _problem("gpu", f"{cards}, but this torch is built without CUDA", "pip install --force-reinstall torch")
    else:
        why = f"torch is built for CUDA {facts.cuda.torch} and cannot use them; the driver may be too old for it"
        yield _problem("gpu", f"{cards}, but {why}", 'python -c "import torch; torch.cuda.init()"')


def weight_paths(facts: Facts) -> Iterator[Verdict]:
    """How weights get from the trainer's GPU to the engines'."""
    if facts.cuda is None or not facts.cuda.works:
        return
    if not facts.cuda.nccl:
        text = "no cupy with NCCL: weights go through the machine's memory, which is slower"
        yield _warning("nccl", text, "pip install 'asyncrl[nccl]'")
        return
    yield _ok("nccl", f"version {facts.cuda.nccl}")
    if facts.cuda.ipc:
        yield _ok("cuda ipc", "works")
    else:
        yield _warning("cuda ipc", "is refused here; weights go another way", "asyncrl run weights.transport=nccl")


def mps(facts: Facts) -> Iterator[Verdict]:
    if len(facts.gpus) != 1:
        return  # on several cards trainer and engines do not share one
    if facts.mps:
        yield _ok("mps", "is on: trainer and engines run side by side on the GPU")
    else:
        yield _warning("mps", "is off: trainer and engines take turns on the GPU", "nvidia-cuda-mps-control -d")


def memory(facts: Facts) -> Iterator[Verdict]:
    text = f"{facts.memory / GIB:.1f} GiB available"
    if facts.memory < 2 * GIB:
        yield _warning("memory", f"{text}, the smallest run takes 2", "ps aux --sort=-rss | head")
    else:
        yield _ok("memory", text)


def shared_memory(facts: Facts) -> Iterator[Verdict]:
    if facts.shared_memory is None:
        return
    size, free = facts.shared_memory
    text = f"/dev/shm has {free / GIB:.2f} of {size / GIB:.2f} GiB free"
    larger = "mount -o remount,size=8G /dev/shm (docker run --shm-size=8g)"
    if size < 256 * MIB:
        yield _problem("shared memory", f"{text}; Ray and the weights lie there", larger)
    elif free < 2 * GIB:
        mend = larger if size < 4 * GIB else "ls -lS /dev/shm"
        yield _warning("shared memory", f"{text}; two versions of the weights must fit", mend)
    else:
        yield _ok("shared memory", text)


def disk(facts: Facts) -> Iterator[Verdict]:
    place = facts.disk
    text = f"{place.directory} has {place.free / GIB:.0f} GiB free"
    if not place.writable:
        yield _problem("disk", f"{place.directory} cannot be written to", f"chmod u+rwx {place.directory}")
    elif place.free < GIB:
        yield _problem("disk", text, ELSEWHERE)
    elif place.fsync_s is None:
        yield _problem("disk", f"{place.directory} refuses fsync, nothing on it is safe", ELSEWHERE)
    elif place.free < 10 * GIB:
        yield _warning("disk", f"{text}; checkpoints of a model of 1B take 12 each", ELSEWHERE)
    elif place.fsync_s > 0.2:
        slow = f"{text}; fsync takes {1000 * place.fsync_s:.0f} ms, and buffer.durability=disk waits for it"
        yield _warning("disk", slow, ELSEWHERE)
    else:
        yield _ok("disk", f"{text}; fsync takes {1000 * place.fsync_s:.1f} ms")


def open_files(facts: Facts) -> Iterator[Verdict]:
    soft, hard = facts.open_files
    if soft >= 4096 or soft < 0:  # a negative one is none
        yield _ok("open files", f"{soft} a process" if soft >= 0 else "no limit")
    elif hard >= 4096 or hard < 0:
        yield _warning("open files", f"{soft} a process is little for Ray", "ulimit -n 65536")
    else:
        text = f"at most {hard} a process, too little for Ray"
        yield _problem("open files", text, "docker run --ulimit nofile=65536, or /etc/security/limits.conf")


def ports(facts: Facts) -> Iterator[Verdict]:
    if not facts.loopback:
        yield _problem("ports", "no port of 127.0.0.1 can be had, and actors talk through them", "ip link set lo up")
    elif facts.taken_ports:
        taken = ", ".join(map(str, facts.taken_ports))
        text = f"{taken} taken: a Ray may run already (cluster=auto joins it); `ray start --head` would fail"
        yield _warning("ports", text, f"ss -ltnp 'sport = :{facts.taken_ports[0]}'")
    else:
        yield _ok("ports", "those of a Ray head node are free")


def sandbox(facts: Facts) -> Iterator[Verdict]:
    if not facts.sandbox:
        yield _ok("sandbox", "bubblewrap contains programs here")
    elif not facts.bubblewrap:
        yield _warning("sandbox", "no bubblewrap: task=code is refused", "apt-get install bubblewrap")
    else:
        why = facts.sandbox.partition(": ")[0]
        yield _warning("sandbox", f"task=code is refused: {why}", "sysctl -w user.max_user_namespaces=10000")


def py_spy(facts: Facts) -> Iterator[Verdict]:
    if not facts.py_spy:
        text = "not installed: a stall is reported without the stacks of processes that hang"
        yield _warning("py-spy", text, "pip install py-spy")
    elif facts.ptrace_scope and not facts.root:
        text = "may not look into processes, so a stall is reported without their stacks"
        yield _warning("py-spy", text, "sudo sysctl -w kernel.yama.ptrace_scope=0")
    else:
        yield _ok("py-spy", "installed")


def clock(facts: Facts) -> Iterator[Verdict]:
    behind = facts.newest_file - facts.now
    if behind > 60:
        yield _problem("clock", f"is {behind / 3600:.1f} h before our own files", "sudo timedatectl set-ntp true")
    elif abs(facts.disk.ahead_s) > 2:
        text = f"differs by {facts.disk.ahead_s:.0f} s from that of the disk {facts.disk.directory}"
        yield _warning("clock", text, "sudo timedatectl set-ntp true")
    else:
        yield _ok("clock", "agrees with the disk's")


def leftovers(facts: Facts) -> Iterator[Verdict]:
    left = facts.leftovers
    if left.processes:
        pids = " ".join(map(str, left.processes))
        yield _warning("leftovers", f"processes whose run is dead: {pids}", "asyncrl doctor --clean")
    if left.bytes > 100 * MIB:
        text = f"{len(left.directories)} directories with Ray's logs of failed runs, {left.bytes / GIB:.1f} GiB"
        yield _warning("leftovers", text, f"rm -r {' '.join(left.directories)}")
    elif not left.processes:
        yield _ok("leftovers", "none to speak of")


CHECKS: tuple[Callable[[Facts], Iterator[Verdict]], ...] = (
    *(python, packages, vllm, transformers, gpu, weight_paths, mps, memory, shared_memory, disk, open_files),
    *(ports, sandbox, py_spy, clock, leftovers),
)
