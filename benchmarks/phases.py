"""A run whose bottleneck moves on command: functions for its trainer and its reward."""

import os
import time
import zlib
from pathlib import Path

from asyncrl.algorithms.base import Tokens

SLOW = "ASYNCRL_BENCH_SLOW"
"""Environment variable with the name of a file: while it exists the trainer is slow."""
SECONDS = 0.9


def loss(tokens: Tokens) -> object:
    if Path(os.environ[SLOW]).exists():
        time.sleep(SECONDS)
    return -tokens.ratio * tokens.advantage_L


def reward(prompt: str, completion: str, answer: str) -> float:
    """As good as random, so that every group has something to learn from."""
    return float(zlib.crc32(completion.encode()) & 1)
