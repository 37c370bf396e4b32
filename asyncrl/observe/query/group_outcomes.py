"""What became of each group, from the buffer's journal."""

import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.buffer import journal
from asyncrl.buffer.journal import Admitted, Asked, Begun, Committed, Delivered, Dropped, Failed, Folded, Record
from asyncrl.errors import CorruptSegmentError
from asyncrl.observe.query.logs import File, Framed, Positions, find_frames

# The records of one file of the journal.
#
# Three of four say that a group was admitted, and of these only the version is asked for: it is read from all of them
# together, with positions as arrays. The others become objects.

ARRAY = struct.Struct(">BI")
"""How msgpack begins an array: a mark and the number of items."""
ARRAY_MARK = 0xDD
SHORTEST = journal.encode(Admitted(0, 0, 0.0, 0))
ADMITTED = SHORTEST[: 2 + len("Admitted")]
"""How the record begins: the number of its fields, the length of its name, the name."""
HEAD, TAIL = (int.from_bytes(part, "big") for part in (ADMITTED[:8], ADMITTED[-8:]))
WORD = 8
SIZES = np.zeros(256, np.int64)
"""Of msgpack's natural numbers, by their first byte; the small ones have no other."""
SIZES[:0x80], SIZES[0xCC:0xD0] = 1, (2, 3, 5, 9)
_decoder = msgspec.msgpack.Decoder(list[Record])


def read_records(file: File) -> tuple[Positions, list[Record]]:
    """The version at which each group was admitted, and all other records."""
    framed = find_frames(file, ADMITTED)
    # The eight bytes from any byte on, as one number.
    words = np.ndarray((max(0, len(file.data) - WORD + 1),), ">u8", file.data, strides=(1,))
    try:
        admitted = _admitted(framed, words)
        _, place = _natural(words, framed.starts[admitted] + len(ADMITTED))
        versions, _ = _natural(words, place)
        return versions, _decode(framed, ~admitted)
    except (IndexError, msgspec.DecodeError) as error:
        raise file.damaged(error) from None


def _admitted(framed: Framed, words: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which frames hold such a record."""
    found = framed.ends - framed.starts >= len(SHORTEST)
    starts = framed.starts[found]
    found[found] = (words[starts] == HEAD) & (words[starts + len(ADMITTED) - WORD] == TAIL)
    return found


def _natural(words: npt.NDArray[Any], places: Positions) -> tuple[Positions, Positions]:
    """The natural numbers of msgpack that lie there, and where the next field begins."""
    first = words[places] >> 56
    sizes = SIZES[first]
    if not np.all(sizes):
        raise IndexError("a record of the journal holds no number where one belongs")
    rest = words[places + 1] >> (8 * (1 + WORD - sizes)).astype(np.uint64)
    return np.where(sizes == 1, first, rest).astype(np.int64), places + sizes


def _decode(framed: Framed, wanted: npt.NDArray[np.bool_]) -> list[Record]:
    """All at once: one array of msgpack is read ten times as fast as its items."""
    starts, ends = framed.starts[wanted].tolist(), framed.ends[wanted].tolist()
    payloads = [framed.file.data[start:end] for start, end in zip(starts, ends, strict=True)]
    return _decoder.decode(ARRAY.pack(ARRAY_MARK, len(payloads)) + b"".join(payloads))


Column = npt.NDArray[np.int64]


class GroupOutcomes(msgspec.Struct):
    """Of the groups that were admitted. They are numbered from 0, and the columns have an entry for each."""

    known: npt.NDArray[np.bool_]
    """Not those that had ended before the part of the journal that is left."""
    size: int
    """Samples of a group."""
    committed: int
    """The newest step that is finished; -1 before the first."""
    versions: Column
    """Served when it was admitted."""
    prompts: Column
    """Index of its prompt in the training stream of the task."""
    steps: Column
    """That the trainer got it for; -1 where it has not."""
    takes: Column
    """In which of the step's deliveries, counted from 0; likewise."""
    drops: Column
    """Why it was dropped, as a place in `reasons`; -1 where it was not."""
    failed: Column
    """The sample for which it was dropped; -1 where the reason holds for all."""
    missing: Column
    """Samples that failed while the others stayed."""
    reasons: Sequence[str]
    failures: Mapping[str, int]
    """Such samples by reason."""


def read_group_outcomes(journal: Iterable[File]) -> GroupOutcomes:
    versions, read = [np.empty(0, np.int64)], list[Record]()
    for file in journal:
        admitted, others = read_records(file)
        versions.append(admitted)
        read += others
    known = np.ones(sum(map(len, versions)), np.bool_)
    first, begun = (read[0] if read else None), next((record for record in read if isinstance(record, Begun)), None)
    if isinstance(first, Folded):
        begun = first.begun
        waiting = {each.group: each.version for each in first.waiting}
        versions.insert(0, np.array([waiting.get(group, -1) for group in range(first.next_group)], np.int64))
        known = np.concatenate([versions[0] >= 0, known])
    groups = len(known)
    drops = [record for record in read if isinstance(record, Dropped)]
    failures = [record for record in read if isinstance(record, Failed)]
    found = GroupOutcomes(
        known=known,
        size=begun.group_size if begun else 0,
        committed=max((record.step for record in read if isinstance(record, Committed)), default=-1),
        versions=np.concatenate(versions),
        prompts=np.arange(groups),
        steps=np.full(groups, -1),
        takes=np.full(groups, -1),
        drops=np.full(groups, -1),
        failed=np.full(groups, -1),
        missing=np.zeros(groups, np.int64),
        reasons=list(dict.fromkeys(record.reason for record in drops)),
        failures=Counter(record.reason for record in failures),
    )
    np.add.at(found.missing, _known((record.group for record in failures), found), 1)
    _ask(read, found)
    _deliver([record for record in read if isinstance(record, Delivered)], found)
    _drop(drops, found)
    return found


def _ask(read: Iterable[Record], found: GroupOutcomes) -> None:
    """What a curriculum chose; without one a group's prompt has its own number."""
    for record in read:
        match record:
            case Asked(group, prompt) if group < len(found.prompts):  # a kill may leave one that was not admitted
                found.prompts[group] = prompt
            case Folded(waiting=waiting):
                for each in waiting:
                    found.prompts[each.group] = each.group if each.prompt < 0 else each.prompt
            case _:
                pass


def _deliver(delivered: list[Delivered], found: GroupOutcomes) -> None:
    steps = np.array([record.step for record in delivered], np.int64)
    sizes = [len(record.groups) for record in delivered]
    groups = _known(chain.from_iterable(record.groups for record in delivered), found)
    order = np.argsort(steps, kind="stable")
    takes = np.empty_like(steps)
    takes[order] = np.arange(len(steps)) - np.searchsorted(steps[order], steps[order])
    found.steps[groups] = np.repeat(steps, sizes)
    found.takes[groups] = np.repeat(takes, sizes)


def _drop(dropped: list[Dropped], found: GroupOutcomes) -> None:
    numbers = {reason: number for number, reason in enumerate(found.reasons)}
    groups = _known((record.group for record in dropped), found)
    found.drops[groups] = [numbers[record.reason] for record in dropped]
    found.failed[groups] = [record.sample for record in dropped]


def _known(groups: Iterable[int], found: GroupOutcomes) -> Column:
    numbers = np.fromiter(groups, np.int64)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(found.versions):
        raise CorruptSegmentError("the journal names groups that were not admitted: see `asyncrl check`")
    return numbers
