"""S3 for vLLM, which starts processes of its own."""

import asyncio
import multiprocessing
import os
from pathlib import Path

import pytest

from asyncrl.config.drafter import NoDrafter
from asyncrl.config.engine import VllmEngine
from asyncrl.engines.vllm.build import build_vllm
from tests.security.inside import is_loopback, listeners
from tests.support.real_vllm import needs_vllm
from tests.support.tiny_model import tiny_checkpoint


def family() -> set[int]:
    """This process and all that descend from it."""
    parents = {int(path.parent.name): _parent(path) for path in Path("/proc").glob("[0-9]*/stat")}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


def sockets(pid: int) -> set[int]:
    links: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.add(os.readlink(descriptor))
        except OSError:
            continue
    return {int(link[8:-1]) for link in links if link.startswith("socket:[")}


@pytest.mark.slow
@needs_vllm
@pytest.mark.timeout(400)
def test_s3_vllm_listens_on_the_loopback(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)

    async def look() -> list[str]:
        settings = VllmEngine(eager=True, max_length=64, max_batch=4, memory=0.1)
        engine = build_vllm(tmp_path, settings, NoDrafter(), name="engine")
        await engine.start()
        try:
            ours = set[int]().union(*map(sockets, family()))
            return [host for host, _, inode in listeners() if inode in ours]
        finally:
            await engine.close()

    assert multiprocessing.active_children() == []
    assert [host for host in asyncio.run(look()) if not is_loopback(host)] == []
