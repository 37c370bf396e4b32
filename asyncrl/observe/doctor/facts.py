"""The facts about a machine that matter to a run, as plain values. `gather` collects them, `checks` judges them."""

import msgspec


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    driver: str
    memory: int


class Cuda(msgspec.Struct, frozen=True, kw_only=True):
    """What the installed packages can do with the GPUs; tried in a process of its own."""

    torch: str = ""
    """The CUDA that torch was built for; empty for a build without."""
    works: bool = False
    """Whether torch can use a GPU."""
    nccl: str = ""
    """Version of NCCL as cupy finds it; empty where there is none."""
    ipc: bool = False
    """Whether a handle of GPU memory can be made for another process."""


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """Where runs are written."""

    directory: str
    writable: bool = True
    free: int = 1 << 40
    fsync_s: float | None = 0.001
    """Seconds to make a small file safe; None where the disk refuses."""
    ahead_s: float = 0.0
    """How far its clock is ahead of this machine's: another machine may serve it."""


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """What ended runs have left behind."""

    processes: tuple[int, ...] = ()
    """Of runs that are dead: Ray's, and whatever else they had started."""
    directories: tuple[str, ...] = ()
    """Ray's logs of runs that failed, kept to be read."""
    bytes: int = 0
    """In them."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults are those of a sound machine without a GPU."""

    python: tuple[int, ...] = (3, 11)
    packages: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Version by distribution, of those that are installed."""
    requirements: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Our own, such as `<2.14,>=2.11`."""
    vllm: str | None = None
    gpu_devices: int = 0
    gpus: tuple[Gpu, ...] = ()
    """As the driver reports them; empty if it does not answer."""
    cuda: Cuda | None = None
    mps: bool = False
    memory: int = 64 << 30
    """Available now."""
    shared_memory: tuple[int, int] | None = (16 << 30, 16 << 30)
    """Size and free bytes of /dev/shm; None where there is none, as on macOS."""
    disk: Disk = Disk(directory="runs")
    open_files: tuple[int, int] = (65536, 65536)
    """The limit, and how far it can be raised."""
    loopback: bool = True
    """Whether a port of 127.0.0.1 can be bound."""
    taken_ports: tuple[int, ...] = ()
    """Of those that the head of a Ray cluster uses."""
    bubblewrap: bool = True
    sandbox: str = ""
    """Why no program can be contained; empty if one can."""
    py_spy: bool = True
    ptrace_scope: int = 0
    """Who may look into whose processes; 0 lets a user see all of their own."""
    root: bool = True
    now: float = 0.0
    newest_file: float = 0.0
    """When the newest of our own files was written."""
    leftovers: Leftovers = Leftovers()
