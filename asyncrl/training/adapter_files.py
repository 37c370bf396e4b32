"""The adapters of a checkpoint, in peft's format, in a folder of their own.

Beside the merged weights transformers would take them for changes still to be made.
"""

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.models import lora
from asyncrl.training.learner import Learner
from asyncrl.training.settings import Lora
from asyncrl.training.shards import TensorFiles, read_rows

FOLDER = "adapter"


def save_adapters(learner: Learner, directory: Path, settings: Lora, base: Path) -> None:
    """Every rank has to come here; the first one writes."""
    found: dict[str, Tensor] = {}
    for own, (part,) in lora.adapter_parts(learner.model):
        whole = learner.ranks.whole(learner.model.get_parameter(own).detach())
        found[lora.PEFT_PREFIX + part.name] = whole.cpu().contiguous()
    if learner.ranks.rank == 0:
        folder = directory / FOLDER
        folder.mkdir()
        save_file(found, folder / lora.WEIGHTS, metadata={"format": "pt"})
        (folder / lora.CONFIG).write_text(lora.peft_config(settings, base))


def restore_adapters(learner: Learner, checkpoint: Path) -> None:
    path = checkpoint / FOLDER / lora.WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{checkpoint} holds no adapters: it was not written with trainer.lora.rank")
    files = TensorFiles([path])
    for own, (part,) in lora.adapter_parts(learner.model):
        name = lora.PEFT_PREFIX + part.name
        if name not in files:
            raise CheckpointError(f"{path} holds no {name}: it was written with other trainer.lora.targets")
        read_rows(files, name, learner.model.get_parameter(own), learner.ranks)
