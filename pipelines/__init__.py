"""What runs: dataflows over actors, and the commands that start, plan, supervise, record and replay them."""

import asyncrl as asyncrl  # first: it knows the old names of modules
