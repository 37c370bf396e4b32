"""A reward for engines without a model: the same answer always gets the same, half of them 1."""

import zlib


def reward(prompt: str, completion: str, answer: str) -> float:
    return float(zlib.crc32(f"{prompt}{completion}".encode()) % 2)
