"""Things that a stranger might hand us, and what becomes of them: `python [-O] -m tests.security.hostile DIRECTORY`.

Every one of them would create the file `canary` if it were run or unpickled.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.buffer.log import FRAME, Header
from asyncrl.buffer.payloads import SCHEMA_HASH
from asyncrl.buffer.reader import read_run
from asyncrl.config import load
from asyncrl.config.engine import VllmEngine
from asyncrl.data.untrusted import read_table
from asyncrl.engines.vllm import environment
from pipelines.compose import compose, from_yaml

SHAPE = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}

Attack = tuple[str, Callable[[], object]]
"""A name, and what would do it."""


class Bomb:
    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._canary,)


class Unpickling(pa.ExtensionType):
    """What CVE-2023-47248 and CVE-2026-41486 were about: metadata that is unpickled when a schema is read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        super().__init__(pa.int64(), "hostile.unpickling")

    def __arrow_ext_serialize__(self) -> bytes:
        return self._data


def cases(directory: Path) -> Iterator[Attack]:
    """What needs no torch, which takes long to import where nothing of it is compiled, as under -O."""
    bomb = pickle.dumps(Bomb(directory / "canary"))
    target = {"_target_": "os.system", "command": f"touch {directory / 'canary'}"}
    yield "extension type", lambda: read_table(_extension(directory / "x.parquet", bomb))
    yield "_target_ in a config", lambda: load({"engine": {"type": "native", **target}})
    yield (
        "_target_ among free options",
        lambda: load({"task": {"type": "reasoning_gym", "dataset": "x", "options": {"inner": [target]}}}),
    )
    yield "_target_ as an override", lambda: compose(["+reward._target_=os.system"])
    yield "Hydra's own launcher", lambda: compose(["hydra/launcher=basic"])
    yield "Hydra's search path", lambda: compose([f"hydra.searchpath=[file://{directory}]"])
    yield (
        "a tag that builds objects",
        lambda: from_yaml(_written(directory / "config.yaml", b"!!python/object/apply:os.getcwd []")),
    )
    yield "trust_remote_code", lambda: compose(["engine=vllm", "engine.trust_remote_code=true"])
    yield "insecure serialization", lambda: _with_variable("VLLM_ALLOW_INSECURE_SERIALIZATION")
    yield "development endpoints", lambda: _with_variable("VLLM_SERVER_DEV_MODE")
    yield (
        "a frame of 4 GiB",
        lambda: list(read_run(_segment(directory / "log", FRAME.pack(2**32 - 2, 0, 0, bytes(16))))),
    )
    yield "a name that leaves the root", lambda: load({"name": "../elsewhere"})


def models(directory: Path) -> Iterator[Attack]:
    from asyncrl.models.checkpoint import load_model

    bomb = pickle.dumps(Bomb(directory / "canary"))
    yield "pickled weights", lambda: load_model(_model(directory / "a", {"pytorch_model.bin": bomb}))
    yield "weights that are a pickle", lambda: load_model(_model(directory / "b", {"model.safetensors": bomb}))
    yield "index that points elsewhere", lambda: load_model(_indexed(directory, "../b/model.safetensors"))
    yield "index that names a pickle", lambda: load_model(_indexed(directory, "pytorch_model.bin"))


def _with_variable(name: str) -> None:
    os.environ[name] = "1"
    try:
        environment.prepare(VllmEngine())
    finally:
        del os.environ[name]


def _model(path: Path, files: dict[str, bytes]) -> Path:
    """A model directory, sound but for these files."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPE))
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def _indexed(directory: Path, name: str) -> Path:
    index = json.dumps({"weight_map": {"model.norm.weight": name}}).encode()
    return _model(directory / name.replace("/", "-").strip("."), {"model.safetensors.index.json": index})


def _extension(path: Path, data: bytes) -> Path:
    kind = Unpickling(data)
    column = pa.ExtensionArray.from_storage(kind, pa.array([0, 1]))
    pq.write_table(pa.table({"step": [0, 1], "reward": column}), path)
    return path


def _segment(directory: Path, frames: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    _written(directory / "trajectories-000000000000000.seg", Header(SCHEMA_HASH, "run", 0).pack() + frames)
    return directory


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def outcomes(attacks: Iterable[Attack]) -> Iterator[str]:
    """Which error each attack ends in."""
    for name, attack in attacks:
        try:
            attack()
        except Exception as error:  # whatever it is, it is compared
            yield f"{name}: {type(error).__name__}: {error}".replace("\n", " ")
        else:
            yield f"{name}: ACCEPTED"


if __name__ == "__main__":
    print(*outcomes(cases(Path(sys.argv[1]))), sep="\n")
