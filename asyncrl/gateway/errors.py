"""What a call can be answered with in place of a reply."""

from asyncrl.errors import AsyncRLError


class CallError(AsyncRLError, ValueError):
    """A call that gets no reply: status of HTTP, the field it is about, and a code that clients know."""

    def __init__(self, status: int, message: str, *, field: str = "", code: str = "") -> None:
        super().__init__(status, message, field, code)
        self.status, self.message, self.field, self.code = status, message, field, code

    def __str__(self) -> str:
        return self.message


class NoRoomError(CallError):
    """All tokens of the episode are used up, or the prompt alone is too long for the model."""

    def __init__(self, prompt_tokens: int, message: str) -> None:
        super().__init__(400, message, field="messages", code="context_length_exceeded")
        self.prompt_tokens = prompt_tokens

    def __reduce__(self) -> tuple[type["NoRoomError"], tuple[int, str]]:
        return NoRoomError, (self.prompt_tokens, self.message)


class AbortedError(CallError):
    """The run or the episode ended while the call was being sampled."""

    def __init__(self) -> None:
        super().__init__(503, "the episode is over: the run ends, or its time is up", code="episode_over")

    def __reduce__(self) -> tuple[type["AbortedError"], tuple[()]]:
        return AbortedError, ()
