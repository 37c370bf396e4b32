"""The gateway between agent harnesses and engines: OpenAI's and Anthropic's API in front, a token-exact record behind.

`GatewayServer` opens and ends episodes; `EpisodeRecord` holds what was sampled in one, as a tree of turns.
"""

from asyncrl.gateway.causes import MEANINGS, BranchCause
from asyncrl.gateway.episode import Sampler
from asyncrl.gateway.errors import AbortedError, CallError, NoRoomError
from asyncrl.gateway.record import EpisodeRecord, SampledTokens
from asyncrl.gateway.server import GatewayServer

__all__ = [
    "MEANINGS",
    "AbortedError",
    "BranchCause",
    "CallError",
    "EpisodeRecord",
    "GatewayServer",
    "NoRoomError",
    "SampledTokens",
    "Sampler",
]
