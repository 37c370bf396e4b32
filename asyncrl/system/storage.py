"""Durable files: checksums, syncing, and one error for a disk that refuses a write."""

import errno
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import google_crc32c
from safetensors import SafetensorError

from asyncrl.errors import AsyncRLError, StorageError

crc32c = cast(Callable[[int, bytes], int], cast(Any, google_crc32c).extend)  # untyped
BLOCK = 1 << 20
WAY_OUT = "make room and try again (asyncrl resume)"


def file_crc32c(path: Path) -> int:
    """Of the whole file."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found = crc32c(found, block)
    return found


def sync(path: Path) -> None:
    """Bring a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def reading(path: Path) -> Generator[None, None, None]:
    """A disk that refuses a read raises StorageError. That says nothing of what the file holds, which is for the caller
    to judge, as is a file that is not there."""
    try:
        yield
    except (AsyncRLError, FileNotFoundError):
        raise
    except OSError as error:
        if error.errno is None:  # a library's, of what it has read
            raise
        reason = f"{error.strerror}; the file may be sound: mend the disk, its mount or the permissions, then try again"
        raise StorageError(error.errno, reason, str(error.filename or path)) from error


@contextmanager
def storing(path: Path) -> Generator[None, None, None]:
    """A disk that refuses a write raises StorageError, which names the file and the way out."""
    try:
        yield
    except AsyncRLError:
        raise
    except OSError as error:
        number, name = error.errno or errno.EIO, error.filename or path
        raise StorageError(number, f"{error.strerror or error}; {WAY_OUT}", str(name)) from error
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise StorageError(number, f"{os.strerror(number)}; {WAY_OUT}", str(path)) from error
