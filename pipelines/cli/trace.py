"""`asyncrl trace RUN`: its timeline as a file for https://ui.perfetto.dev or chrome://tracing."""

import os
import sys
from pathlib import Path

import msgspec

from asyncrl.errors import StorageError
from asyncrl.observe.query.tables import open_run
from asyncrl.observe.trace import Trace

NAME = "trace.json"


def write_trace(run: Path, out: Path | None = None) -> Path:
    """The file, RUN/trace.json unless named. It takes the place of an older one when it is complete."""
    path = out or run / NAME
    scratch = path.with_name(f".{path.name}.partial")
    with open_run(run) as connection:
        trace = Trace(connection)
        try:
            _write(scratch, trace)
            scratch.replace(path)
        except OSError as error:
            message = f"{error.strerror}; name another place with --out"
            raise StorageError(error.errno, message, str(path)) from error
    if trace.left_out:
        print(trace.left_out, file=sys.stderr)
    return path


def _write(path: Path, trace: Trace) -> None:
    encode = msgspec.json.Encoder(enc_hook=str).encode
    path.unlink(missing_ok=True)  # a link that somebody put there would be followed
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + encode({"left_out": trace.left_out}))
        file.write(b',"traceEvents":[')
        for number, event in enumerate(trace.events()):
            file.write((b",\n" if number else b"\n") + encode(event))
        file.write(b"\n]}\n")
