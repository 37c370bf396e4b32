"""From settings to an engine. Each engine is imported only when chosen."""

from pathlib import Path

from asyncrl.config import FakeEngine, NativeEngine, Run
from asyncrl.engines.base import Engine


def build_engine(run: Run, model_path: Path, *, name: str) -> Engine:
    match run.engine:
        case NativeEngine():
            import torch

            from asyncrl.engines.native.engine import NativeEngine as Native

            torch.set_num_threads(run.engine.threads)
            dtype = torch.bfloat16 if run.rollout.precision == "bf16" else torch.float32
            return Native(model_path, run.engine, name=name, dtype=dtype)
        case FakeEngine():
            from asyncrl.engines.fake import FakeEngine as Fake

            return Fake(run.engine, name=name)
