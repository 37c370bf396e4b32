"""The bytes of a trajectory's payload, written and read without Arrow's help: a fifth of the time for a small answer.

A record batch of one row and a fixed schema has metadata of a fixed shape, in which only lengths and offsets differ.
What is written here is byte for byte what pyarrow writes. What is read here has exactly that shape; bytes of any other,
whoever wrote them, are left to Arrow.
"""

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from asyncrl.types import Floats, Ints

PREFIX = struct.Struct("<40sq40s")
BEFORE_BODY_LENGTH = bytes.fromhex("ffffffff6803000014000000000000000c0016000600050008000c000c0000000003040018000000")
"""Marker, length of the metadata, and the beginning of its flatbuffer tables, which say where the rest is."""
AFTER_BODY_LENGTH = bytes.fromhex(
    "00000a0018000c00040008000a0000003c02000010000000010000000000000000000000" + "22000000"
)
BUFFERS = struct.Struct("<68q")
"""Offset and length of each."""
NODES = struct.Struct("<4xI30q")
"""Rows and nulls of each column, and of the items of each list."""
HEAD_SIZE = PREFIX.size + BUFFERS.size + NODES.size
SIZES = struct.Struct("<192xq40xq40xq40xq152xq")
"""Where the metadata says how long the four texts and the tokens are."""
Texts = tuple[str, str, str, str]
"""Prompt, engine, precision and finish."""
Numbers = tuple[float, float, float]
"""Reward, start and end."""
SHAPES = 4096
"""That are remembered: answers of one length to prompts of one length share theirs."""


class Fields(NamedTuple):
    """A row as it lies in a payload."""

    group: int
    sample: int
    texts: Texts
    numbers: Numbers
    tokens: Ints
    logprobs: Floats
    versions: Ints
    parts: str | None = None
    """None in all rows that are read here: others are left to Arrow."""


class _Shape(NamedTuple):
    """All payloads whose texts and lists are as long."""

    head: bytes
    body: struct.Struct
    lengths: tuple[int, ...]
    """The offsets in the body: each text and list begins at 0 and ends where it is over."""


def write(group: int, sample: int, texts: Texts, numbers: Numbers, lists: tuple[bytes, bytes, bytes]) -> bytes:
    """`lists`: tokens, log-probabilities and versions, four bytes an item and of equal length."""
    prompt, engine, precision, finish = (text.encode() for text in texts)
    p, e, q, f, size = len(prompt), len(engine), len(precision), len(finish), len(lists[0])
    shape, n = _shape(p, e, q, f, size), size // 4
    words = (0, p, prompt, 0, e, engine, 0, q, precision, 0, f, finish)
    items = (0, n, lists[0], 0, n, lists[1], 0, n, lists[2])
    return shape.head + shape.body.pack(group, sample, *words, *numbers, *items)


def read(payload: bytes) -> Fields | None:
    """None for bytes that `write` has not written; what they mean is not checked."""
    if len(payload) < HEAD_SIZE:
        return None
    sizes = SIZES.unpack_from(payload)
    if min(sizes) < 0 or sum(sizes) > len(payload) or sizes[-1] % 4:
        return None
    shape = _shape(*sizes)
    if len(payload) != HEAD_SIZE + shape.body.size or not payload.startswith(shape.head):
        return None
    found = shape.body.unpack_from(payload, HEAD_SIZE)
    if (*found[2:14:3], *found[3:14:3], *found[17::3], *found[18::3]) != shape.lengths:
        return None
    try:
        prompt, engine, precision, finish = [text.decode() for text in found[4:14:3]]
    except UnicodeDecodeError:
        return None
    tokens, logprobs, versions = found[19::3]
    return Fields(
        group=found[0],
        sample=found[1],
        texts=(prompt, engine, precision, finish),
        numbers=(found[14], found[15], found[16]),
        tokens=np.frombuffer(tokens, np.int32),
        logprobs=np.frombuffer(logprobs, np.float32),
        versions=np.frombuffer(versions, np.int32),
    )


@lru_cache(SHAPES)
def _shape(prompt: int, engine: int, precision: int, finish: int, items: int) -> _Shape:
    """Buffers lie one behind the other, from multiples of eight; a validity bitmap that is not there has length 0."""
    texts = (prompt, engine, precision, finish)
    lengths = [0, 8, 0, 4]
    for text in texts:
        lengths += (0, 8, text)
    lengths += (0, 8, 0, 8, 0, 8, *(0, 8, 0, items) * 3)
    buffers: list[int] = []
    place = 0
    for length in lengths:
        buffers += (place, length)
        place += length + -length % 8
    nodes = (1, 0) * 9 + (1, 0, items // 4, 0) * 3
    prefix = PREFIX.pack(BEFORE_BODY_LENGTH, place, AFTER_BODY_LENGTH)
    head = b"".join((prefix, BUFFERS.pack(*buffers), NODES.pack(len(nodes) // 2, *nodes)))
    words, lists = "".join(map(_with_offsets, texts)), 3 * _with_offsets(items)
    return _Shape(head, struct.Struct(f"<qi4x{words}3d{lists}"), (*(0,) * 4, *texts, *(0,) * 3, *(items // 4,) * 3))


def _with_offsets(size: int) -> str:
    return f"ii{size}s{-size % 8}x"
