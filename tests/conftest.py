"""For all tests: an example of hypothesis may take as long as the machine needs for it, and every run tries the same
ones, so that a change is judged by itself. `--hypothesis-profile=searching` looks for new ones."""

from hypothesis import settings

settings.register_profile("patient", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None)
settings.load_profile("patient")
