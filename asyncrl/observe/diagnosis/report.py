"""What a stall leaves in the run directory: `stall.txt` for people and `stall.json` for programs."""

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from asyncrl.errors import StallError
from asyncrl.observe.diagnosis.snapshot import Explanation, Snapshot
from asyncrl.system.run_directory import replace

TEXT, JSON = "stall.txt", "stall.json"


def chain(explanation: Explanation) -> str:
    """What a terminal shows: no stacks, which are for whoever looks into the file."""
    links = "\n".join(f"  {number}. {link}" for number, link in enumerate(explanation.chain, start=1))
    return f"who waits for whom\n{links}"


def render(explanation: Explanation, stacks: Mapping[str, str]) -> str:
    dumps = "\n\n".join(f"stack of {name}\n{stack.rstrip()}" for name, stack in stacks.items())
    return f"{explanation.sentence}\n\n{chain(explanation)}\n\n{dumps}\n"


def write(directory: Path, explanation: Explanation, snapshot: Snapshot, stacks: Mapping[str, str]) -> None:
    content = {
        "time": time.time(),
        "exit_code": StallError.exit_code,
        **msgspec.to_builtins(explanation),
        "stacks": dict(stacks),
        "snapshot": msgspec.to_builtins(snapshot),
    }
    replace(directory / TEXT, render(explanation, stacks).encode())
    replace(directory / JSON, msgspec.json.format(msgspec.json.encode(content)) + b"\n")


def clear(directory: Path) -> None:
    """A resumed run has not stalled; the sentence of the one before stays in its events."""
    for name in (TEXT, JSON):
        (directory / name).unlink(missing_ok=True)
