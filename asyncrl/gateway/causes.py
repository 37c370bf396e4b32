"""Why a call of an episode did not go on from the tokens before it: every cause, and what it means."""

from collections.abc import Mapping
from enum import StrEnum


class BranchCause(StrEnum):
    NEW_CONVERSATION = "new_conversation"
    PARALLEL_CALL = "parallel_call"
    INTERLEAVED = "interleaved"
    SAMPLED_AGAIN = "sampled_again"
    EARLIER_TURN = "earlier_turn"
    HISTORY_EDITED = "history_edited"
    TOOLS_CHANGED = "tools_changed"
    REASONING_STRIPPED = "reasoning_stripped"
    TOOL_CALL_RERENDERED = "tool_call_rerendered"
    RERENDERED = "rerendered"


MEANINGS: Mapping[BranchCause, str] = {
    BranchCause.NEW_CONVERSATION: "a conversation of its own, such as a sub-agent's",
    BranchCause.PARALLEL_CALL: "another call of the same conversation was being sampled; also `n` above 1",
    BranchCause.INTERLEAVED: "it continues its conversation as it should; another conversation's call came in between",
    BranchCause.SAMPLED_AGAIN: "the same messages were sent before",
    BranchCause.EARLIER_TURN: "it goes on from a turn that another call has already continued with other messages",
    BranchCause.HISTORY_EDITED: "messages were changed or left out",
    BranchCause.TOOLS_CHANGED: "the same conversation with other tools or template options",
    BranchCause.REASONING_STRIPPED: "the chat template leaves out the reasoning of earlier turns",
    BranchCause.TOOL_CALL_RERENDERED: "a tool call came back, or was rendered, in other words than the model's",
    BranchCause.RERENDERED: "the chat template writes an earlier turn in other tokens than were sampled",
}
