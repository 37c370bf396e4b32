"""What vLLM reads from the environment, set before it is imported; the user's own choice wins."""

import os
from collections.abc import Iterator

from asyncrl.config.engine import VllmEngine
from asyncrl.errors import ConfigError
from asyncrl.system import quiet

OWNER = "ASYNCRL_ENGINE_OWNER"
"""Process without which the engine's own have no reason to live."""
SPECULATION = "ASYNCRL_ENGINE_SPECULATION"
"""What our scheduler inside vLLM has to know (scheduler.py), as JSON. Not in vLLM's own settings, because its cache of
compiled code goes by these, and a folder in it is another one each time."""
DOORS = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "vLLM would unpickle what it is sent",
    "VLLM_SERVER_DEV_MODE": "vLLM would serve endpoints that run what they are sent",
}


def problems(settings: VllmEngine) -> Iterator[str]:
    """A sentence for each variable that opens a door which the settings do not."""
    for name, why in DOORS.items():
        value = os.environ.get(name, "")
        if value not in ("", "0") and name not in settings.allow_unsafe:
            yield f"{name}={value} is set and {why}: unset it, or accept that with engine.allow_unsafe=[{name}]"


def prepare(settings: VllmEngine, precision: str = "fp32") -> None:
    for problem in problems(settings):
        raise ConfigError(problem)
    wanted = {
        "VLLM_LOGGING_LEVEL": "INFO" if quiet.verbose() else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # fp32 means fp32: by itself Triton multiplies such numbers with ten bits of mantissa on GPUs.
        "TRITON_F32_DEFAULT": "ieee",
        # The output matrix and what it meets are fp32 with the numbers of bf16 (options.py): TF32 multiplies these
        # exactly, and several times as fast. For numbers that are fp32 throughout it would be wrong.
        "VLLM_FLOAT32_MATMUL_PRECISION": "high" if settings.carrier(precision) == "bf16" else "highest",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(settings.start_timeout_s)),
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_cache_gib),
        # By itself vLLM binds its threads to cores that the trainer beside it uses as well.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings.threads),
    }
    os.environ[OWNER] = str(os.getpid())
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
