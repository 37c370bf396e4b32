"""For all tests: an example of hypothesis may take as long as the machine needs for it."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
