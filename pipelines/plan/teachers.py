"""Whether the teachers of a distillation can judge what the model writes."""

from collections.abc import Iterator, Mapping
from contextlib import suppress

from asyncrl.config import Run
from asyncrl.data.tokenizer import character_vocabulary, load_tokenizer
from asyncrl.errors import CheckpointError, MissingDependencyError
from asyncrl.models.config import read_config
from asyncrl.system.devices import has_gpu
from asyncrl.tasks.chains import CHARACTERS, END
from pipelines.plan.estimate import model_config

Vocabulary = Mapping[str, int]


def problems(run: Run) -> Iterator[str]:
    """A sentence for each teacher that cannot."""
    student = _vocabulary(run)
    for number, teacher in enumerate(run.teachers):
        field = f"teachers[{number}].path={teacher.path}"
        try:
            own, model = load_tokenizer(teacher.directory).vocabulary, read_config(teacher.directory, teacher.backend)
        except (CheckpointError, MissingDependencyError) as error:
            yield f"{field}: {error}"
            continue
        if student is not None and (difference := _difference(student, own)):
            yield (
                f"{field} does not write with the tokens of the model that is trained: {difference}; take a teacher "
                "with the same tokenizer"
            )
        elif model.vocabulary <= max(own.values()):
            yield (
                f"{field} has embeddings of {model.vocabulary} tokens, and its tokenizer writes token "
                f"{max(own.values())}: the two files belong to different models"
            )
        if teacher.device == "cuda" and run.cluster in ("local", "inprocess") and not has_gpu():
            yield f"teachers[{number}].device=cuda, and this machine has no GPU; use device: auto"
    with suppress(CheckpointError, MissingDependencyError):  # which is said elsewhere
        if run.distill.top_k > (size := model_config(run).vocabulary):
            yield f"distill.top_k={run.distill.top_k} is more than the {size} tokens of the model: set it to {size}"


def _vocabulary(run: Run) -> Vocabulary | None:
    """Of the model that is trained; None where that cannot be read, which is said elsewhere."""
    if (directory := run.model.directory) is None:
        return character_vocabulary(CHARACTERS, END)
    try:
        return load_tokenizer(directory).vocabulary
    except CheckpointError:
        return None


def _difference(student: Vocabulary, teacher: Vocabulary) -> str:
    """The first token that the teacher lacks or has under another number, in words. It may have others besides."""
    for token, number in sorted(student.items(), key=lambda each: each[1]):
        if (other := teacher.get(token)) != number:
            return f"{token!r} is token {number}, and of the teacher {'none' if other is None else f'token {other}'}"
    return ""
