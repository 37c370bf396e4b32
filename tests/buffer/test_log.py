"""The framed log: every damage is found, every torn tail is cut, a full disk loses nothing."""

import os
import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer import log
from asyncrl.buffer.log import FRAME, HEADER_SIZE, Location, Log, segment_paths
from asyncrl.errors import ConfigError, CorruptSegmentError, StorageError
from tests.support.full_disk import file_size_limit

SCHEMA = bytes(range(16))
SLOT = b"s" * 16


def open_log(directory: Path, *, segment_bytes: int = 1 << 20, run_id: str = "run", sync: bool = False) -> Log:
    return Log(directory, "t", run_id=run_id, schema=SCHEMA, segment_bytes=segment_bytes, sync=sync)


def recovered(log: Log) -> list[bytes]:
    return [frame.payload for _, frame in log.recover()]


def write(directory: Path, *payloads: bytes, seal: bool) -> tuple[Path, list[Location]]:
    log = open_log(directory)
    assert recovered(log) == []
    places = [log.append([(SLOT, payload)])[0] for payload in payloads]
    if seal:
        log.seal()
    [path] = segment_paths(directory, "t")
    return path, places


def test_what_is_appended_is_read_back_across_segments(tmp_path: Path) -> None:
    payloads = [bytes([i]) * (i * 7) for i in range(40)]
    log = open_log(tmp_path, segment_bytes=500)
    assert recovered(log) == []
    places = [place for i in range(0, 40, 3) for place in log.append([(SLOT, p) for p in payloads[i : i + 3]])]
    assert [log.read(place) for place in places] == payloads
    paths = segment_paths(tmp_path, "t")
    assert len(paths) > 5
    assert [path.suffix for path in paths] == [".seg"] * (len(paths) - 1) + [".open"]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    again = open_log(tmp_path, segment_bytes=500)
    assert recovered(again) == payloads
    again.append([(SLOT, b"more")])
    assert recovered(open_log(tmp_path)) == [*payloads, b"more"]


def test_many_frames_in_one_call(tmp_path: Path) -> None:
    log = open_log(tmp_path, sync=True)
    assert recovered(log) == []
    payloads = [str(i).encode() for i in range(1500)]
    log.append([(SLOT, payload) for payload in payloads])
    assert recovered(open_log(tmp_path)) == payloads


def test_every_single_byte_flip_of_a_sealed_segment_is_found(tmp_path: Path) -> None:
    path, _ = write(tmp_path, b"one", b"", b"three" * 5, seal=True)
    good = path.read_bytes()
    for offset in range(len(good)):
        for flip in (0x01, 0x80, 0xFF):
            path.write_bytes(good[:offset] + bytes([good[offset] ^ flip]) + good[offset + 1 :])
            with pytest.raises(CorruptSegmentError, match=rf"{path.name} is damaged at offset \d+"):
                recovered(open_log(tmp_path))


def test_a_sealed_segment_cut_short_or_lengthened_is_found(tmp_path: Path) -> None:
    path, _ = write(tmp_path, b"one", b"two", seal=True)
    good = path.read_bytes()
    for bad in [good[:cut] for cut in range(len(good))] + [good + b"x", good + good]:
        path.write_bytes(bad)
        with pytest.raises(CorruptSegmentError):
            recovered(open_log(tmp_path))


def test_a_missing_segment_is_found(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=1)
    assert recovered(log) == []
    for i in range(3):
        log.append([(SLOT, bytes([i]))])
    segment_paths(tmp_path, "t")[1].unlink()
    with pytest.raises(CorruptSegmentError, match="does not follow"):
        recovered(open_log(tmp_path))


def test_a_torn_tail_is_cut_at_every_length_and_counted(tmp_path: Path) -> None:
    payloads = [b"one", b"twotwo", b"3" * 40]
    path, places = write(tmp_path, *payloads, seal=False)
    good = path.read_bytes()
    ends = [*(place.offset for place in places), len(good)]
    for cut in range(len(good)):
        path.write_bytes(good[:cut])
        log = open_log(tmp_path)
        whole = sum(end <= cut for end in ends[1:])
        assert recovered(log) == payloads[:whole]
        assert log.torn_bytes == (cut - ends[whole] if cut >= HEADER_SIZE else cut)
        log.append([(SLOT, b"next")])
        assert recovered(open_log(tmp_path)) == [*payloads[:whole], b"next"]


@settings(max_examples=100, deadline=None)
@given(garbage=st.binary(min_size=1, max_size=100))
def test_garbage_after_the_last_frame_is_cut(tmp_path_factory: pytest.TempPathFactory, garbage: bytes) -> None:
    directory = tmp_path_factory.mktemp("log")
    path, _ = write(directory, b"one", seal=False)
    path.write_bytes(path.read_bytes() + garbage)
    log = open_log(directory)
    assert recovered(log) == [b"one"]
    assert log.torn_bytes == len(garbage)


def test_a_crash_between_footer_and_rename_finishes_the_seal(tmp_path: Path) -> None:
    path, _ = write(tmp_path, b"one", seal=True)
    path.rename(path.with_suffix(".open"))
    log = open_log(tmp_path)
    assert recovered(log) == [b"one"]
    assert log.torn_bytes == 0
    assert path.exists()
    log.append([(SLOT, b"two")])
    assert recovered(open_log(tmp_path)) == [b"one", b"two"]


def test_a_damaged_header_over_frames_is_never_taken_for_a_torn_tail(tmp_path: Path) -> None:
    path, _ = write(tmp_path, b"one", seal=False)
    path.write_bytes(b"X" + path.read_bytes()[1:])
    with pytest.raises(CorruptSegmentError, match="offset 0: the header"):
        recovered(open_log(tmp_path))


def test_another_runs_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, b"one", seal=False)
    with pytest.raises(CorruptSegmentError, match="belongs to run 'run'"):
        recovered(open_log(tmp_path, run_id="other"))


def test_a_hostile_length_allocates_nothing(tmp_path: Path) -> None:
    path, places = write(tmp_path, b"one", b"two", seal=True)
    raw = bytearray(path.read_bytes())
    for length in (0xFFFFFFFE, log.MAX_PAYLOAD + 1, log.MAX_PAYLOAD, len(raw)):
        raw[places[0].offset : places[0].offset + 4] = length.to_bytes(4, "little")
        path.write_bytes(raw)
        with pytest.raises(CorruptSegmentError, match=f"a frame of {length} bytes cannot be there"):
            recovered(open_log(tmp_path))


def test_a_payload_that_rots_after_it_was_stored_is_found_when_read(tmp_path: Path) -> None:
    path, [place] = write(tmp_path, b"payload", seal=True)
    log = open_log(tmp_path)
    assert recovered(log) == [b"payload"]
    raw = bytearray(path.read_bytes())
    raw[place.offset + FRAME.size] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptSegmentError, match=f"{path.name} is damaged at offset {place.offset}"):
        log.read(place)


@pytest.mark.parametrize("room", [0, 10, HEADER_SIZE + 5, HEADER_SIZE + 3000])
def test_a_full_disk_is_a_clear_error_and_the_log_goes_on_when_there_is_room(tmp_path: Path, room: int) -> None:
    log = open_log(tmp_path, segment_bytes=4000)
    assert recovered(log) == []
    stored: list[bytes] = []

    def fill() -> None:
        for i in range(100):
            batch = [bytes([i]) * 300, bytes([i]) * 200]
            log.append([(SLOT, payload) for payload in batch])
            stored.extend(batch)

    with file_size_limit(room), pytest.raises(OSError, match="nothing of this call was stored"):
        fill()
    assert recovered(open_log(tmp_path)) == stored
    for i in range(20):
        log.append([(SLOT, b"after" * i)])
        stored.append(b"after" * i)
    again = open_log(tmp_path)
    assert recovered(again) == stored
    assert again.torn_bytes == 0


def test_only_whole_sealed_segments_below_the_mark_are_pruned(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=1)
    assert recovered(log) == []
    for i in range(4):
        log.append([(SLOT, bytes([i])), (SLOT, bytes([i]))])
    assert log.prune(1) == []
    assert len(log.prune(5)) == 2
    assert recovered(open_log(tmp_path)) == [b"\x02", b"\x02", b"\x03", b"\x03"]
    assert len(log.prune(100)) == 1, "the open segment stays"


def test_a_process_that_dies_slowly_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys; from pathlib import Path; from asyncrl.buffer.log import lock_directory; "
        f"lock_directory(Path({str(tmp_path)!r})); print(flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with monkeypatch.context() as patched:
            patched.setattr(log, "LOCK_S", 0.0)
            with pytest.raises(ConfigError, match="is in use by another process"):
                log.lock_directory(tmp_path)
        Timer(0.5, holder.kill).start()
        os.close(log.lock_directory(tmp_path))
        assert holder.wait() == -9


def test_a_directory_that_takes_no_new_file_is_a_storage_error(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")  # a directory that is not there stands for a disk without a free inode
    with pytest.raises(StorageError, match="make room and try again"):
        log.append([(SLOT, b"lost")])
    (tmp_path / "log").mkdir()
    log.append([(SLOT, b"kept")])
    assert recovered(open_log(tmp_path / "log")) == [b"kept"]


def test_sequences_go_on_after_everything_was_pruned(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=100)
    for i in range(5):
        log.append([(SLOT, bytes([i]) * 200)])
    log.seal()
    assert len(log.prune(5)) == 4, "the newest file says where sequences are"
    again = open_log(tmp_path)
    assert recovered(again) == [bytes([4]) * 200]
    (place,) = again.append([(SLOT, b"next")])
    assert (place.sequence, again.first_kept) == (5, 4)
