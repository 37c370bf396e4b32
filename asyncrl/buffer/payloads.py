"""The payloads of live groups: found in the trajectory log, kept in memory as far as the cache allows."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.buffer.log import Location, Log, new_digest
from asyncrl.data.arrow import COLUMNS
from asyncrl.types import Slot

if TYPE_CHECKING:  # readers of a log need no settings
    from asyncrl.config import Buffer

STEM = "trajectories"
SCHEMA_HASH = new_digest("\n".join(f"{name}: {kind}" for name, kind in COLUMNS.items()).encode()).digest()
CACHE_BYTES = 256 << 20


class Payloads:
    """Bytes by slot. Without a log (durability `memory`) the cache is all there is, bounded by admission."""

    def __init__(self, log: Log | None, cache_bytes: int = CACHE_BYTES) -> None:
        self._log = log
        self._cache_bytes = cache_bytes
        self._cached = 0
        self._cache: dict[int, dict[int, bytes]] = defaultdict(dict)
        self._locations: dict[int, dict[int, Location]] = defaultdict(dict)

    @property
    def next_sequence(self) -> int:
        return self._log.next_sequence if self._log else 0

    def groups(self) -> Iterable[int]:
        """Groups with at least one sample on disk that are neither consumed nor dropped."""
        return self._locations

    def put(self, items: Sequence[tuple[Slot, bytes]]) -> None:
        """Store all or nothing, at the durability level when this returns."""
        if self._log:
            locations = self._log.append([(pack_slot(slot), payload) for slot, payload in items])
            for (slot, _), location in zip(items, locations, strict=True):
                self.locate(slot, location)
        for slot, payload in items:
            # A newcomer is left out rather than an old one evicted: the oldest groups are taken first.
            if not self._log or self._cached + len(payload) <= self._cache_bytes:
                self._cache[slot.group][slot.sample] = payload
                self._cached += len(payload)

    def locate(self, slot: Slot, location: Location) -> bool:
        """Note where the frame of a slot lies; False when the slot is already filled."""
        samples = self._locations[slot.group]
        return samples.setdefault(slot.sample, location) is location

    def get(self, slot: Slot) -> bytes:
        payload = self._cache.get(slot.group, {}).get(slot.sample)
        if payload is not None:
            return payload
        location = self._locations.get(slot.group, {}).get(slot.sample)
        if location is None or self._log is None:
            raise ValueError(f"the payload of {slot} is not held: its group was consumed, dropped or pruned")
        return self._log.read(location)

    def forget(self, group: int) -> None:
        self._cached -= sum(map(len, self._cache.pop(group, {}).values()))
        self._locations.pop(group, None)

    def first_sequence(self, groups: Iterable[int]) -> int:
        """The lowest sequence number among the samples of `groups`."""
        sequences = (location.sequence for group in groups for location in self._locations.get(group, {}).values())
        return min(sequences, default=self.next_sequence)


def open_log(directory: Path, run_id: str, settings: "Buffer") -> Log:
    return Log(
        directory,
        STEM,
        run_id=run_id,
        schema=SCHEMA_HASH,
        segment_bytes=settings.segment_bytes,
        sync=settings.durability == "disk",
    )


def pack_slot(slot: Slot) -> bytes:
    return slot.group.to_bytes(8, "little") + slot.sample.to_bytes(8, "little")


def unpack_slot(raw: bytes) -> Slot:
    return Slot(int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little"))
