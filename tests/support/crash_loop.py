"""Kill a run of the buffer with SIGKILL again and again, and check what it promised.

    python -m tests.support.crash_loop DIRECTORY --kills 200 --seed 0 [--prune]

Each life is a real process that restores from its last checkpoint, replays, and goes on: it admits, appends, takes,
commits. What `append` acknowledged goes through a pipe that survives the kill. A torn write, which a kill rarely
hits, is added by hand to some of the corpses.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from asyncrl.buffer.log import HEADER_SIZE
from asyncrl.buffer.reader import read_run, verify
from asyncrl.buffer.retention import read_pruned
from asyncrl.types import Slot, Ticket
from tests.support.buffer_stores import open_buffer, payload

TERMS: dict[str, Any] = {"group_size": 2, "groups_per_step": 4, "max_staleness": 2, "segment_bytes": 60_000}
PRUNING: dict[str, Any] = {"keep": "steps:1", "segment_bytes": 4_000, "journal_bytes": 1_000}
"""So little that files are folded and deleted all the time."""


def live(directory: Path, pipe: int, seed: int, *, prune: bool) -> None:
    """One life: it ends when it is killed."""
    rng = random.Random(seed)
    terms = TERMS | (PRUNING if prune else {})
    saved = directory.with_suffix(".checkpoint")
    step = int(saved.read_text()) if saved.exists() else 0
    buffer = open_buffer(directory, restore_step=step if directory.exists() else None, **terms)

    def tell(*words: object) -> None:
        os.write(pipe, json.dumps(words).encode() + b"\n")

    def train() -> None:
        nonlocal step
        while (delivery := buffer.take(max_groups=rng.randint(1, 4))) is not None:
            assert len(buffer.read(delivery)) == 2 * len(delivery.groups)
            tell("deliver", step, *delivery.groups)
            if buffer.status().taken == TERMS["groups_per_step"]:
                buffer.commit(step)
                step += 1
                buffer.advance(step)
                if rng.random() < 0.3:
                    temporary = saved.with_suffix(".new")
                    temporary.write_text(str(step))
                    temporary.rename(saved)
                    buffer.checkpointed(step)
                    buffer.prune()

    while buffer.replaying:
        train()
    slots = [Slot(ticket.group, sample) for ticket in buffer.reissue(0.0) for sample in ticket.samples]
    while True:
        while isinstance(ticket := buffer.admit(0.0), Ticket):
            slots += [Slot(ticket.group, sample) for sample in ticket.samples]
        rng.shuffle(slots)
        batch, slots = slots[:5], slots[5:]
        payloads = [payload(slot.group, slot.sample, buffer.status().version, rng.randint(1, 400)) for slot in batch]
        for receipt in buffer.append_many(payloads + payloads[:1]):
            tell(receipt.status, receipt.slot.group, receipt.slot.sample)
        train()
        assert buffer.ledger().balanced


def crash(directory: Path, seed: int, seconds: float, *, prune: bool) -> list[list[Any]]:
    """Start a life, kill it, and return what it had said."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            live(directory, writer, seed, prune=prune)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    said = bytearray()
    end = time.monotonic() + seconds
    os.set_blocking(reader, False)
    alive = True
    while alive or time.monotonic() < end:
        if time.monotonic() >= end and alive:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), f"the life ended by itself: {said[-200:]!r}"
            alive = False
        try:
            said += os.read(reader, 1 << 16)
        except BlockingIOError:
            time.sleep(0.001)
    while chunk := os.read(reader, 1 << 16):
        said += chunk
    os.close(reader)
    return [json.loads(line) for line in said.splitlines() if line.endswith(b"]")]


def tear(directory: Path, rng: random.Random) -> None:
    """Leave an unfinished write at the end of an open file. Behind half a header it would be damage, and no crash."""
    files = sorted(path for path in directory.glob("*.open") if path.stat().st_size >= HEADER_SIZE)
    if files and rng.random() < 0.5:
        with rng.choice(files).open("ab") as file:
            file.write(rng.randbytes(rng.randint(1, 2000)))


def main(directory: Path, kills: int, seed: int, *, prune: bool = False) -> dict[str, int]:
    rng = random.Random(seed)
    acknowledged: set[tuple[int, int]] = set()
    trained: dict[int, list[int]] = {}
    for kill in range(kills):
        heard: dict[int, list[int]] = {}
        for word, *rest in crash(directory, seed * 1_000_003 + kill, rng.uniform(0.01, 0.3), prune=prune):
            if word == "deliver":
                heard.setdefault(rest[0], []).extend(rest[1:])
            elif word == "stored":
                assert tuple(rest) not in acknowledged, f"slot {rest} was stored twice"
                acknowledged.add((rest[0], rest[1]))
        for step, groups in heard.items():
            known = trained.setdefault(step, groups)
            shorter = min(len(known), len(groups))
            assert known[:shorter] == groups[:shorter], f"step {step} was trained on {known}, then on {groups}"
            trained[step] = max(known, groups, key=len)
        tear(directory, rng)
    recovered = Counter((item.slot.group, item.slot.sample) for item in read_run(directory))
    groups = Counter(group for step in trained.values() for group in step)
    report = verify(directory)
    lost = {slot for slot in acknowledged - recovered.keys() if not (prune and slot[0] in groups)}
    return {
        "kills": kills,
        "acknowledged": len(acknowledged),
        "recovered": len(recovered),
        "lost": len(lost),
        "pruned": read_pruned(directory).trajectories,
        "duplicated": report.duplicates + sum(count - 1 for count in recovered.values()),
        "bad_files": len(report.bad),
        "steps": len(trained),
        "trained_twice": sum(count - 1 for count in groups.values()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prune", action="store_true", help="delete what was trained on, all the time")
    arguments = parser.parse_args()
    result = main(arguments.directory, arguments.kills, arguments.seed, prune=arguments.prune)
    print(json.dumps(result))
    sys.exit(any(result[name] for name in ("lost", "duplicated", "bad_files", "trained_twice")))
