"""A receiver of weights in a process of its own: it holds plain tensors, and can be stopped and killed.

Run as `python -m tests.support.weight_receiver NAME [dies]`, it answers one line for each manifest that it reads;
with `dies` it kills itself in the middle of its first broadcast.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import torch

from asyncrl.errors import ActorError, WeightSyncError
from asyncrl.types import WeightAck, WeightManifest
from asyncrl.weights.flat import word_sums
from asyncrl.weights.transports.registry import addressed_to, digest_published, published

READY = b"ready\n"


class Answer(msgspec.Struct):
    ack: WeightAck | None = None
    refusal: str = ""


class ProcessEngine:
    """Stands for the process, with the methods of a rollout actor that a publisher calls."""

    def __init__(self, name: str, *options: str) -> None:
        self.name, self._options = name, options
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, **environment: str) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.weight_receiver",
            self.name,
            *self._options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=os.environ | environment,
        )
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == READY

    async def load_weights(self, manifest: WeightManifest) -> WeightAck:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(addressed_to(manifest, self.name)) + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise ActorError(f"actor {self.name} died during load_weights")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.ack is None:
            raise WeightSyncError(answer.refusal)
        return answer.ack

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._process is not None:
            await self._process.wait()


class Held:
    """What an engine would serve: copies of tensors, replaced whole or not at all."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._version = 0
        self.tensors: dict[str, torch.Tensor] = {}

    def load(self, manifest: WeightManifest) -> Answer:
        try:
            digest = digest_published(manifest)
            if digest != manifest.digest:
                raise WeightSyncError(f"weights of version {manifest.version} have digest {digest}")
        except WeightSyncError as error:
            return Answer(refusal=f"engine {self._name}: {error}; version {self._version} is kept")
        self.tensors = {name: tensor.clone() for name, tensor in published(manifest).tensors()}
        self._version = manifest.version
        return Answer(ack=WeightAck(self._name, self._version, digest))


def _die_in_mid_broadcast() -> None:
    """The first part is on its way, the others never come."""
    from asyncrl.weights.transports.nccl import CupyLink

    broadcast = CupyLink.broadcast

    def broadcast_and_die(self: CupyLink, part: torch.Tensor) -> None:
        broadcast(self, part)
        os.kill(os.getpid(), signal.SIGKILL)

    CupyLink.broadcast = broadcast_and_die


def _warm_up() -> None:
    """What the first version on a GPU would wait for: CUDA, cupy and the digest's kernel."""
    if torch.cuda.is_available():
        word_sums(torch.zeros(64, dtype=torch.uint8, device="cuda"), [(0, 64)])


def main(name: str, *options: str) -> None:
    held = Held(name)
    _warm_up()
    if "dies" in options:
        _die_in_mid_broadcast()
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        answer = held.load(msgspec.json.decode(line, type=WeightManifest))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
