"""Several ranks of a trainer, as processes of this machine, that play scenes one after the other."""

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.config import Trainer
from asyncrl.training.distributed.ranks import Ranks, RankSeat, Rendezvous

Scene = Callable[[Ranks, Path], None]
WAIT_S = 60.0
END_S = 240.0


def play(
    world: int, scenes: Sequence[Scene], folder: Path, *, device: str = "cpu", **degrees: Any
) -> dict[str, list[str]]:
    """What went wrong in each scene, by rank: empty words where nothing did. The first failure ends the play.
    `degrees` are settings of the trainer. With `device=cuda` all are on one card."""
    wait_s = WAIT_S if device == "cpu" else END_S  # on a card one compiles while the other waits
    rendezvous = Rendezvous("127.0.0.1", world, wait_s)
    spawning = multiprocessing.get_context("spawn")
    processes = [
        spawning.Process(target=_rank, args=(seat, scenes, folder, Trainer(ranks=world, **degrees), device))
        for seat in rendezvous.seats
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(END_S)
        process.kill()
        process.join()
    told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]
    return {scene.__name__: [found.get(scene.__name__, "not played") for found in told] for scene in scenes}


def play_well(folder: Path, scenes: Sequence[Scene], world: int, *, device: str = "cpu", **degrees: Any) -> None:
    """As `play`, and nothing goes wrong."""
    played = play(world, scenes, folder, device=device, **degrees)
    assert "".join("".join(found) for found in played.values()) == ""


def _rank(seat: RankSeat, scenes: Sequence[Scene], folder: Path, settings: Trainer, device: str) -> None:
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else the scenes' learners would take a card that is here
    from asyncrl.training.distributed.fsdp import FsdpRanks

    torch.set_num_threads(1)
    ranks = FsdpRanks(seat, torch.device(device, 0) if device == "cuda" else torch.device(device), settings)
    found: dict[str, str] = {}
    for scene in scenes:
        try:
            scene(ranks, folder)
            found[scene.__name__] = ""
        except BaseException:
            found[scene.__name__] = traceback.format_exc()
            break
        finally:
            (folder / f"rank-{seat.rank}.json").write_text(json.dumps(found))
    ranks.leave()
