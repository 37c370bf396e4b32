"""What vLLM reads from the environment, set before it is imported; the user's own choice wins."""

import os

from asyncrl.engines.settings import VllmEngine

OWNER = "ASYNCRL_ENGINE_OWNER"
"""Process without which the engine's own have no reason to live."""
SPECULATION = "ASYNCRL_ENGINE_SPECULATION"
"""What our scheduler inside vLLM has to know (scheduler.py), as JSON. Not in vLLM's own settings, because its cache of
compiled code goes by these, and a folder in it is another one each time."""


def prepare(settings: VllmEngine) -> None:
    wanted = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # fp32 means fp32: by itself Triton multiplies such numbers with ten bits of mantissa on GPUs.
        "TRITON_F32_DEFAULT": "ieee",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(settings.start_timeout_s)),
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_cache_gib),
        # By itself vLLM binds its threads to cores that the trainer beside it uses as well.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings.threads),
    }
    os.environ[OWNER] = str(os.getpid())
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
