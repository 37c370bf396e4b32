"""Families that our own decoder does not know, in vLLM: as transformers computes them, and so after each update."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.engines.base import OnUpdate
from tests.support.driving import PROMPT, Answer, ask, collect_all, publishing_files
from tests.support.families import FAMILIES, family_checkpoint
from tests.support.parity import gathered, reference_logits
from tests.support.real_vllm import SharedVllm, needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(300)]
