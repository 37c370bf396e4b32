"""What became of each group, from the buffer's journal."""

from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.buffer.records import Begun, Committed, Delivered, Dropped, Record
from asyncrl.errors import CorruptSegmentError
from asyncrl.insight.logs import File
from asyncrl.insight.records import read_records

Column = npt.NDArray[np.int64]


class Fates(msgspec.Struct):
    """Of the groups that were admitted. They are numbered from 0, and the columns have an entry for each."""

    size: int
    """Samples of a group."""
    committed: int
    """The newest step that is finished; -1 before the first."""
    versions: Column
    """Served when it was admitted."""
    steps: Column
    """That the trainer got it for; -1 where it has not."""
    takes: Column
    """In which of the step's deliveries, counted from 0; likewise."""
    drops: Column
    """Why it was dropped, as a place in `reasons`; -1 where it was not."""
    failed: Column
    """The sample for which it was dropped; -1 where the reason holds for all."""
    reasons: Sequence[str]


def read_fates(journal: Iterable[File]) -> Fates:
    versions, read = [np.empty(0, np.int64)], list[Record]()
    for file in journal:
        admitted, others = read_records(file)
        versions.append(admitted)
        read += others
    groups = sum(map(len, versions))
    drops = [record for record in read if isinstance(record, Dropped)]
    found = Fates(
        size=next((record.group_size for record in read if isinstance(record, Begun)), 0),
        committed=max((record.step for record in read if isinstance(record, Committed)), default=-1),
        versions=np.concatenate(versions),
        steps=np.full(groups, -1),
        takes=np.full(groups, -1),
        drops=np.full(groups, -1),
        failed=np.full(groups, -1),
        reasons=list(dict.fromkeys(record.reason for record in drops)),
    )
    _deliver([record for record in read if isinstance(record, Delivered)], found)
    _drop(drops, found)
    return found


def _deliver(delivered: list[Delivered], found: Fates) -> None:
    steps = np.array([record.step for record in delivered], np.int64)
    sizes = [len(record.groups) for record in delivered]
    groups = _known(chain.from_iterable(record.groups for record in delivered), found)
    order = np.argsort(steps, kind="stable")
    takes = np.empty_like(steps)
    takes[order] = np.arange(len(steps)) - np.searchsorted(steps[order], steps[order])
    found.steps[groups] = np.repeat(steps, sizes)
    found.takes[groups] = np.repeat(takes, sizes)


def _drop(dropped: list[Dropped], found: Fates) -> None:
    numbers = {reason: number for number, reason in enumerate(found.reasons)}
    groups = _known((record.group for record in dropped), found)
    found.drops[groups] = [numbers[record.reason] for record in dropped]
    found.failed[groups] = [record.sample for record in dropped]


def _known(groups: Iterable[int], found: Fates) -> Column:
    numbers = np.fromiter(groups, np.int64)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(found.versions):
        raise CorruptSegmentError("the journal names groups that were not admitted: see `asyncrl check`")
    return numbers
