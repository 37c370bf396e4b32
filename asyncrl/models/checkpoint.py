"""Hugging Face checkpoints in safetensors: what transformers wrote we read, what we write transformers reads."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.models.config import ARCHITECTURES, ModelConfig, read_config
from asyncrl.models.decoder import Decoder
from asyncrl.models.names import hf_tensors, unpacked

WEIGHTS = "model.safetensors"
SHARD_BYTES = 5_000_000_000
"""Of one file at most, as Hugging Face has it."""


def load_model(
    path: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *, output: bool = True
) -> tuple[Decoder, ModelConfig]:
    """Read a model directory; tensors are cast to `dtype`. Without `output` an untied output matrix is left out."""
    directory = Path(path)
    config = read_config(directory) if output else read_config(directory).without_output()
    model = Decoder(config, dtype).to(device)
    missing = dict(hf_tensors(model))
    unexpected: list[str] = []
    for name, tensor in unpacked(read_weights(directory)):
        if name in missing:
            _fill(missing.pop(name), name, tensor)
        elif not _redundant(name, config):
            unexpected.append(name)
    _fits(directory, config, missing, unexpected)
    return model, config


def check_names(directory: Path, config: ModelConfig, wanted: set[str], found: set[str]) -> None:
    """That the files of a checkpoint hold what its model consists of."""
    _fits(directory, config, wanted - found, [name for name in found - wanted if not _redundant(name, config)])


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


def save_model(model: Decoder, directory: Path | str, tensors: Iterable[tuple[str, Tensor]] | None = None) -> None:
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
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": found}, indent=2))


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


def save_config(model: Decoder, directory: Path, dtype: torch.dtype) -> None:
    (directory / "config.json").write_text(json.dumps(_config_of(model, dtype), indent=2, sort_keys=True) + "\n")


def _config_of(model: Decoder, dtype: torch.dtype) -> dict[str, object]:
    """The config as it was read, except that it names the dtype really saved."""
    raw = dict(model.config.raw)
    key = "torch_dtype" if "torch_dtype" in raw and "dtype" not in raw else "dtype"
    raw[key] = str(dtype).removeprefix("torch.")
    raw.setdefault("architectures", [ARCHITECTURES[model.config.family] + "ForCausalLM"])
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


def weight_files(directory: Path) -> list[Path]:
    """Where the weights of a model directory are."""
    index = directory / f"{WEIGHTS}.index.json"
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if index.is_file():
        return [_beside(index, name) for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    raise CheckpointError(
        f"{directory} holds no {WEIGHTS} and no {index.name}; pickled weights (.bin) are not read, convert them with "
        f"transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
    )


def _beside(index: Path, name: str) -> Path:
    """An index names files of its own directory; one that points elsewhere is not followed."""
    if name != Path(name).name or not name.endswith(".safetensors"):
        raise CheckpointError(f"{index} names {name!r}, which is no .safetensors file beside it; download it again")
    return index.parent / name


def _fill(target: Tensor, name: str, source: Tensor) -> None:
    if target.shape != source.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(source.shape)}, but config.json asks for {tuple(target.shape)}; "
            f"the two files belong to different models"
        )
    target.copy_(source)


def _redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some writers add although they follow from others."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")


def _names(listed: list[str]) -> str:
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "") if listed else "nothing"
