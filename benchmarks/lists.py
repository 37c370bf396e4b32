"""Questions with short answers and a long tail: lists of words to be reversed, and now and then a count to a hundred.

The tail stays while a model learns, because a count earns the more the further it goes.
"""

from collections.abc import Iterator
from itertools import count, takewhile
from random import Random

from asyncrl.types import Prompt

WORDS = """
apple river stone cloud green house table light paper water bread horse train music field chair glass night money plant
story voice white black small large happy quiet early young north south heart metal sugar ocean tiger eagle brush wheel
clock shirt shoes phone radio piano storm beach grass maple honey lemon grape peach salad knife spoon plate lunch dream
smile dance watch write learn teach build carry climb drive sleep laugh visit point round sharp smooth sweet
"""
COUNTS = 32
"""One question in so many is a count: two of a step of 64 groups."""
HIGHEST = 100, 190
FORM_SHARE = 0.1
"""Of the reward: for an answer that ends with its tag, right or wrong."""


def reversal(random: Random, size: int) -> tuple[str, str]:
    """Question and answer."""
    words = random.sample(WORDS.split(), size)
    return f"Reverse this list of words: {', '.join(words)}", ", ".join(reversed(words))


def counting(highest: int) -> tuple[str, str]:
    return f"Count from 1 to {highest}.", ", ".join(map(str, range(1, highest + 1)))


def prompts() -> Iterator[Prompt]:
    random = Random("lists")
    shown = [*(reversal(random, size) for size in (3, 4, 5)), counting(5)]
    earlier = tuple(turn for question, answer in shown for turn in (question, f"<answer>{answer}</answer>"))
    for number in count():
        long = random.randrange(COUNTS) == 0
        question, answer = counting(random.randint(*HIGHEST)) if long else reversal(random, random.randint(3, 6))
        yield Prompt(uid=f"lists/{number}", text=question, answer=answer, earlier=earlier)


def reward(prompt: str, completion: str, answer: str) -> float:
    """What stands before the first mistake counts, against all that is given or wanted; 1 is a right answer.

    An answer that was cut off loses only the share for its form: a count that was right so far is better than none.
    """
    opening, begun, rest = completion.partition("<answer>")
    inside, ended, after = rest.partition("</answer>")
    if not begun or opening.strip() or after.strip():
        return 0.0
    given, wanted = inside.strip().split(", "), answer.split(", ")
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(given, wanted, strict=False)))
    return FORM_SHARE * bool(ended) + (1 - FORM_SHARE) * right / max(len(given), len(wanted))
