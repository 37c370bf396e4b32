"""A game of two roles, both played by the policy: the keeper knows a digit, the guesser has to find it. Each of them
has a conversation of its own and sees of the other what it says, one character a turn.

asyncrl run experiment=quickstart agent.function=examples/own_game.py:game
"""

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from asyncrl.user_code.agents import Access, Outcome

ROUNDS = 4
OPENAI = AsyncOpenAI(base_url="http://localhost", api_key="of its episode")
"""Its connections are shared by all episodes."""


class Player:
    def __init__(self, access: Access) -> None:
        self._client = OPENAI.with_options(base_url=access.url, api_key=access.key)
        self._model = access.model
        self._messages: list[ChatCompletionMessageParam] = []

    async def reply(self, heard: str) -> str:
        self._messages.append({"role": "user", "content": heard})
        reply = await self._client.chat.completions.create(model=self._model, messages=self._messages, max_tokens=1)
        said = reply.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": said})
        return said


def compare(guess: str, secret: str) -> str:
    """What an honest keeper says: the secret is higher, lower, or found."""
    if not guess.isdigit():
        return ""
    return "=" if guess == secret else "+" if guess < secret else "-"


async def game(prompt: str, answer: str, access: Access) -> Outcome:
    secret = answer.rstrip("$")[-1]
    guesser, keeper = Player(access), Player(access)
    turn_rewards: list[float] = []
    hint, found = "=", False
    while not found and len(turn_rewards) < 2 * ROUNDS:
        guess = await guesser.reply(hint)
        hint = await keeper.reply(f"{secret}{guess}=")
        found = guess == secret
        turn_rewards += [0.1 * guess.isdigit(), 0.2 * (hint == compare(guess, secret))]
    return Outcome(reward=float(found), turn_rewards=tuple(turn_rewards))
