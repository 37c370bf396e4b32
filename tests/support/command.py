"""`asyncrl WORDS` in the test's own process, which has imported torch already: seconds less than a process of its own.
What is killed, or watched from outside, is started as one by `quickstart_runs`."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from pipelines.cli import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


def asyncrl(*words: str | Path) -> Done:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main([str(word) for word in words])
    return Done(code, out.getvalue(), err.getvalue())
