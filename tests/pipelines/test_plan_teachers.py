"""What `asyncrl plan` knows of teachers: whether they write with the student's tokens, and what they take."""

import shutil
from pathlib import Path

import msgspec
import pytest

from asyncrl.config import Run
from asyncrl.config.distillation import Distillation, Teacher
from asyncrl.config.run import Checkpoint
from asyncrl.config.task import ChainsTask
from asyncrl.data.tokenizer import load_tokenizer, save_character_tokenizer
from asyncrl.fleet.placement import Offer, demands
from asyncrl.tasks.chains import CHARACTERS, END
from pipelines.plan import plan
from pipelines.plan.estimate import PROCESS, longest_prompt, model_config, needs, token_bytes
from tests.support.tiny_model import tiny_checkpoint


def _run(model: Path, *teachers: Path, **parts: object) -> Run:
    return Run(
        name="planned",
        model=Checkpoint(path=str(model)),
        task=ChainsTask(),
        teachers=tuple(Teacher(path=str(each)) for each in teachers),
        **parts,
    )


def _random_teacher(directory: Path, characters: str, *, vocabulary: int) -> Path:
    directory.mkdir()
    tiny_checkpoint(directory, vocab_size=vocabulary)
    save_character_tokenizer(directory, characters, END, 256)
    return directory


def test_a_teacher_with_the_same_tokens_may_have_more_of_them(tmp_path: Path, model: Path) -> None:
    size = load_tokenizer(model).size
    teachers = [_random_teacher(tmp_path / "wider", CHARACTERS + "<>", vocabulary=size + 10)]
    assert plan.problems(_run(model, model, *teachers)) == []


@pytest.mark.parametrize("warm_start", [False, True])
def test_other_tokens_are_refused_by_name(tmp_path: Path, model: Path, warm_start: bool) -> None:
    swapped = _random_teacher(tmp_path / "swapped", CHARACTERS[1] + CHARACTERS[0] + CHARACTERS[2:], vocabulary=60)
    narrow = _random_teacher(tmp_path / "narrow", CHARACTERS, vocabulary=5)
    lacking = _random_teacher(tmp_path / "lacking", CHARACTERS[:-1], vocabulary=60)
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "tokenizer.json").unlink()
    run = _run(model, swapped, narrow, lacking, bare)
    if warm_start:
        run = Run(name="planned", teachers=run.teachers)
    first, second, third, fourth = plan.problems(run)
    assert first == (
        f"teachers[0].path={swapped} does not write with the tokens of the model that is trained: {CHARACTERS[0]!r} is "
        "token 2, and of the teacher token 3; take a teacher with the same tokenizer"
    )
    assert "has embeddings of 5 tokens, and its tokenizer writes token" in second
    assert f"{CHARACTERS[-1]!r} is token {len(CHARACTERS) + 1}, and of the teacher none" in third
    assert fourth.startswith(f"teachers[3].path={bare}: ")


def test_no_teacher_has_more_likely_tokens_than_the_student_has_tokens(model: Path) -> None:
    size = load_tokenizer(model).size
    assert plan.problems(_run(model, model, distill=Distillation(top_k=size))) == []
    for run in (_run(model, model), Run(name="planned", teachers=(Teacher(path=str(model)),))):
        (problem,) = plan.problems(msgspec.structs.replace(run, distill=Distillation(top_k=size + 1)))
        assert problem == f"distill.top_k={size + 1} is more than the {size} tokens of the model: set it to {size}"


def test_each_takes_a_core_or_a_card_and_its_memory(model: Path) -> None:
    run = _run(model, model, model)
    cluster = Offer(nodes=({"CPU": 8.0, "GPU": 4.0},))
    assert demands(run, cluster)["teacher"].bundle == {"CPU": 1.0, "GPU": 1.0}
    assert demands(run, cluster)["teacher"].processes == 2
    laptop = Offer(nodes=({"CPU": 8.0},), attached=False)
    assert demands(run, laptop)["teacher"].bundle == {"CPU": 1.0}
    assert "teacher" not in demands(_run(model), cluster)
    found, without = (needs(each, model_config(each), longest_prompt(each)) for each in (run, _run(model)))
    assert found.teachers_in_host == 2 * (4 * found.parameters + PROCESS)
    assert found.token == without.token + 4
    ranked = _run(model, model, distill=Distillation(top_k=16))
    assert token_bytes(ranked, model_config(ranked)) == without.token + 4 + 16 * 8 + 4
    assert found.host(run) - without.host(run) == found.teachers_in_host
