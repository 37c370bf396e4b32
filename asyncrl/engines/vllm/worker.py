"""Inside vLLM's worker process: published weights go from the trainer's memory into the model.

vLLM imports this module because the engine names `WeightReader` as its worker extension; importing it registers our
weight transfer backend, which vLLM then drives: start, update, finish. Our loader of checkpoints is registered here as
well, and our attention, by its path: it is imported when a model is loaded that shall use it.
"""

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from asyncrl.engines.adapters import check_adapters, has_adapters
from asyncrl.engines.vllm.environment import OWNER
from asyncrl.engines.vllm.fp8 import InFp8, check_names
from asyncrl.engines.vllm.loader import base_of, in_blocks, in_place
from asyncrl.engines.vllm.options import BACKEND
from asyncrl.models import lora
from asyncrl.types import WeightManifest
from asyncrl.weights.flat import word_sums
from asyncrl.weights.transports.registry import digest_published, read_published


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand: a manifest says everything."""


@dataclass
class Publication(WeightTransferUpdateInfo):
    manifest: str
    """A WeightManifest as JSON: the only kind of value that needs no pickle on its way here."""


class ManifestTransfer(WeightTransferEngine[NoInitInfo, Publication]):
    """Loads what a manifest points to, by vLLM's layer-wise reload unless the weights can be overwritten in place."""

    _in_fp8: InFp8 | None = None
    """The update that is under way, where something is in FP8."""
    init_info_cls = NoInitInfo
    update_info_cls = Publication

    def init_transfer_engine(self, init_info: NoInitInfo) -> None: ...

    @property
    def _in_place(self) -> bool:
        return in_place(self.model_config, self.device)

    def start_weight_update(self) -> None:
        if not self._in_place:
            self._drop_expert_kernels()
            initialize_layerwise_reload(self.model)

    def _drop_expert_kernels(self) -> None:
        """On a CPU vLLM pads and packs experts where it makes their kernel, so each version needs a new one. The kernel
        has no state besides. On a GPU it stays: captured graphs know its tensors.

        True for 0.29; delete when `UnquantizedFusedMoEMethod` packs them at each load.
        """
        if self.device.type != "cpu":
            return
        for layer in self.model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, FusedMoEMethodBase):
                method.moe_kernel = None

    def receive_weights(self, update_info: Publication) -> None:
        load_weights: Any = self.model.load_weights  # every vLLM model has it, but torch.nn.Module does not
        manifest = _decode(update_info.manifest)
        published = self._whole(manifest)
        self._in_fp8 = None if manifest.fp8 is None else InFp8(self.model, manifest.version, manifest.fp8)
        try:
            load_weights(published if self._in_fp8 is None else self._in_fp8.watching(published))
        except BaseException:
            self._finish_layers()  # vLLM ends the update here, and with a head that is half new it goes on
            raise

    def _whole(self, manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
        """Published weights, or what adapters make of the base."""
        published = read_published(manifest, self.device)
        if not has_adapters(manifest):
            return published
        adapters = lora.unstacked((name, tensor.to(self.model_config.dtype)) for name, tensor in published)
        merged = lora.merged_tensors(base_of(self.model).tensors.items(), adapters)
        return in_blocks(merged, self.model_config, self.device)

    def finish_weight_update(self) -> None:
        self._finish_layers()
        if self._in_fp8 is not None:
            self._in_fp8.finish()

    def _finish_layers(self) -> None:
        """The model can compute again. Layers that got nothing new are as they were."""
        if not self._in_place:
            finalize_layerwise_reload(self.model, self.model_config)
            self._pack_tied_head()

    def _pack_tied_head(self) -> None:
        """An output matrix that is the embedding gets no weights of its own, so the reload forgets what is made of it.

        Seen with 0.29 on a CPU; delete when `finalize_layerwise_reload` processes layers with shared parameters.
        """
        head: Any = getattr(self.model, "lm_head", None)
        if getattr(self.model_config.hf_config, "tie_word_embeddings", False) and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None: ...

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Abstract in vLLM 0.26 only; delete when 0.27 is the oldest that is supported."""
        raise NotImplementedError


class WeightReader:
    """Methods that vLLM adds to its worker."""

    def prepare_updates(self) -> None:
        """Load what the first update needs (cupy, kernels): it would otherwise take 50 ms while requests wait."""
        if torch.cuda.is_available():
            word_sums(torch.zeros(64, dtype=torch.uint8, device="cuda"), [(0, 64)])

    def check_published(self, manifest: str) -> str:
        """Digest of the bytes that this worker would load, read from where it would; raises if they do not fit."""
        decoded, model = _decode(manifest), self.get_model()
        check_names(model, decoded)
        if has_adapters(decoded):
            check_adapters(decoded, base_of(model).adapted, "vLLM's worker")
        return digest_published(decoded)

    get_model: Callable[[], torch.nn.Module]
    """vLLM's own."""


def _decode(manifest: str) -> WeightManifest:
    return msgspec.json.decode(manifest, type=WeightManifest)


def _end_with_owner() -> None:
    """vLLM's processes outlive an owner that is killed, and keep its GPU; wait for that, and end them."""
    owner = int(os.environ[OWNER])
    end = os.pidfd_open(owner)

    def watch() -> None:
        select.select([end], [], [])
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid not in (None, owner):
            os.kill(parent.pid, signal.SIGKILL)  # the engine's process, where workers have one of their own
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="owner", daemon=True).start()


WeightTransferEngineFactory.register_engine(BACKEND, ManifestTransfer)
register_backend(AttentionBackendEnum.CUSTOM, "asyncrl.engines.vllm.attention.Backend")
_end_with_owner()
