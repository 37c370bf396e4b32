"""For all tests: an example of hypothesis may take as long as the machine needs for it, and every run tries the same
ones, so that a change is judged by itself. `--hypothesis-profile=searching` looks for new ones."""

import os
from tempfile import TemporaryDirectory

from hypothesis import settings

_trackio = TemporaryDirectory(prefix="trackio-")
os.environ["TRACKIO_DIR"] = _trackio.name  # it looks once, when it is imported, which TRL does as well

settings.register_profile("patient", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None)
settings.load_profile("patient")
