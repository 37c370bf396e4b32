"""Hugging Face checkpoints in safetensors: what transformers wrote we read, what we write transformers reads."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.config.run import Backend
from asyncrl.errors import CheckpointError
from asyncrl.models.config import ModelConfig, read_config
from asyncrl.models.decoder import Decoder
from asyncrl.models.files import INDEX, WEIGHTS, weight_files
from asyncrl.models.names import hf_tensors, unpacked
from asyncrl.models.policy import PolicyModel
from asyncrl.models.transformers_model import TransformersModel

SHARD_BYTES = 5_000_000_000
"""Of one file at most, as Hugging Face has it."""


def load_model(
    path: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *, output: bool = True
) -> tuple[Decoder, ModelConfig]:
    """Read a model directory into our decoder; tensors are cast to `dtype`. Without `output` an untied output matrix is
    left out."""
    directory = Path(path)
    config = read_config(directory) if output else read_config(directory).without_output()
    model = Decoder(config, dtype).to(device)
    _read_into(model, directory, unpacked(read_weights(directory)))
    return model, config


def load_policy(directory: Path, backend: Backend, dtype: torch.dtype, *, output: bool = True) -> PolicyModel:
    """The same for whichever backend is wanted."""
    model = empty_policy(directory, backend, dtype, output=output)
    tensors = read_weights(directory)
    _read_into(model, directory, unpacked(tensors) if isinstance(model, Decoder) else tensors)
    return model


def empty_policy(directory: Path, backend: Backend, dtype: torch.dtype, *, output: bool = True) -> PolicyModel:
    """Without weights, in memory that nothing is written to yet."""
    config = read_config(directory, backend)
    if config.backend == "native":
        return Decoder(config if output else config.without_output(), dtype)
    return TransformersModel(directory, config, dtype, output=output)


def _read_into(model: PolicyModel, directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    missing = dict(hf_tensors(model))
    unexpected: list[str] = []
    for name, tensor in tensors:
        if name in missing:
            _fill(missing.pop(name), name, tensor)
        elif not model.redundant(name):
            unexpected.append(name)
    _fits(directory, model.config, missing, unexpected)


def check_names(directory: Path, model: PolicyModel, found: set[str]) -> None:
    """That the files of a checkpoint hold what its model consists of."""
    wanted = {part.name for _, parts in model.parts() for part in parts}
    _fits(directory, model.config, wanted - found, [name for name in found - wanted if not model.redundant(name)])


def _fits(directory: Path, config: ModelConfig, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    lacking, extra = sorted(missing), sorted(unexpected)
    if lacking or extra:
        raise CheckpointError(
            f"{directory} does not fit its config.json (model_type={config.family}): missing {_names(lacking)}, "
            f"unexpected {_names(extra)}; download or save the checkpoint again"
        )


def random_model(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """A fresh model as transformers would initialise it: normal matrices, unit norms, zero biases."""
    model = Decoder(config, dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in hf_tensors(model):
        if name.endswith("bias"):
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, config.initializer_range, generator=generator)
    return model


def save_model(model: PolicyModel, directory: Path | str, tensors: Iterable[tuple[str, Tensor]] | None = None) -> None:
    """Write `config.json`, `model.safetensors` and an index: the model's own tensors, unless others are given for them.

    Big models are written in shards, as Hugging Face's are: only one is in the host's memory at a time. One file has an
    index, too: without one vLLM reads every safetensors file of a directory, also the optimizer's of a checkpoint.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    dtype = torch.float32
    for shard in _shards(tensors or hf_tensors(model)):
        dtype = next(iter(shard.values())).dtype
        save_file(shard, directory / f"{WEIGHTS}.{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
    save_config(model, directory, dtype)
    files = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    if len(shards) == 1:
        files = [WEIGHTS]
    for number, file in enumerate(files):
        (directory / f"{WEIGHTS}.{number}").rename(directory / file)
    found = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": found}, indent=2))


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.cpu()
        size += tensor.nbytes
    yield shard


def save_config(model: PolicyModel, directory: Path, dtype: torch.dtype) -> None:
    (directory / "config.json").write_text(json.dumps(_config_of(model, dtype), indent=2, sort_keys=True) + "\n")


def _config_of(model: PolicyModel, dtype: torch.dtype) -> dict[str, object]:
    """The config as it was read, except that it names the dtype really saved."""
    raw = dict(model.config.raw)
    key = "torch_dtype" if "torch_dtype" in raw and "dtype" not in raw else "dtype"
    raw[key] = str(dtype).removeprefix("torch.")
    raw.setdefault("architectures", [model.config.architecture])
    return raw


def read_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Everything that is in the files."""
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (a handle, not a dict)
                    yield name, opened.get_tensor(name)
        except (SafetensorError, FileNotFoundError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}; download the checkpoint again") from None


def _fill(target: Tensor, name: str, source: Tensor) -> None:
    if target.shape != source.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(source.shape)}, but config.json asks for {tuple(target.shape)}; "
            f"the two files belong to different models"
        )
    target.copy_(source)


def _names(listed: list[str]) -> str:
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "") if listed else "nothing"
