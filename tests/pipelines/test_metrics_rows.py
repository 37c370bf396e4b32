"""Rows of metrics: converted once, whole on disk, damage is found."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.data.untrusted import read_table
from asyncrl.errors import CorruptSegmentError, StorageError
from pipelines.recording.metrics import CHUNK, ENGINE_ROWS, MetricsRows, Row


def row(step: int) -> Row:
    """Some figures come later, some are of another kind, some are nested."""
    found: Row = {"step": step, "reward": step / 2, "engines": {"engine": ["rollout-0"], "version": [step]}}
    if step > 300:
        found |= {"parts": {"right": 1.0}, "count": step if step < 400 else step + 0.5}
    return found


def test_rows_are_those_that_were_appended_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    path, number = tmp_path / "metrics.parquet", 2 * CHUNK + 100
    rows = MetricsRows(path, before=0)
    for step in range(number):
        rows.append(row(step))
        assert rows[-1]["step"] == step
        if step % 97 == 0:
            rows.write()
            assert read_table(path)["step"].to_pylist() == list(range(step + 1))
    rows.write()
    assert [each["step"] for each in rows] == list(range(len(rows))) == list(range(number))
    assert (rows[0]["step"], rows[CHUNK]["step"], rows[-1]["step"]) == (0, CHUNK, number - 1)
    written = read_table(path).to_pylist()
    assert [each["engines"] is None for each in written] == [step < number - ENGINE_ROWS for step in range(number)]
    assert (written[350]["parts"], written[350]["count"], written[450]["count"]) == ({"right": 1.0}, 350.0, 450.5)
    again = MetricsRows(path, before=320)
    again.append(row(320))
    again.write()
    assert read_table(path)["step"].to_pylist() == list(range(321))
    with pytest.raises(IndexError):
        again[321]


def test_a_flipped_byte_of_the_numbers_is_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.parquet"
    rows = MetricsRows(path, before=0)
    for step in range(50):
        rows.append({"step": step, "loss": 1 / (step + 1)})
    rows.write()
    good = path.read_bytes()
    end = len(good) - 8 - int.from_bytes(good[-8:-4], "little")  # where the footer begins
    found = 0
    for offset in range(4, end):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        try:
            found += read_table(path).to_pylist() == rows[:]
        except CorruptSegmentError:
            continue
    assert found <= 8, "bytes of page headers that say nothing about the numbers"


def test_a_damaged_file_is_set_aside_and_the_rows_begin_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.parquet"
    path.write_bytes(b"PAR1 and no more")
    rows = MetricsRows(path, before=8)
    assert rows.damaged.startswith(f"{path} cannot be read: ")
    assert rows.damaged.endswith("; it is damaged-metrics.parquet now, and the rows begin again with step 9")
    assert (tmp_path / "damaged-metrics.parquet").read_bytes() == b"PAR1 and no more"
    rows.append(row(8))
    rows.write()
    again = MetricsRows(path, before=9)
    assert ([each["step"] for each in again], again.damaged) == ([8], "")


def test_a_file_that_the_disk_does_not_give_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.parquet"
    os.mknod(path, stat.S_IFSOCK | 0o600)  # to open it is an error for root, too
    with pytest.raises(StorageError, match=r"the file may be sound: mend the disk"):
        MetricsRows(path, before=1)


def test_rows_that_two_threads_write_are_whole(tmp_path: Path) -> None:
    """One whose caller was cancelled is still at it when the end of the run writes."""
    path = tmp_path / "metrics.parquet"
    rows = MetricsRows(path, before=0)
    for step in range(600):
        rows.append(row(step))
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(rows.write) for _ in range(12)]:
            done.result()
    assert read_table(path)["step"].to_pylist() == list(range(600))
