"""Conversations with tools, in the tokens of one model: chat templates, tool calls and reasoning."""

from asyncrl.chat.format import ChatFormat
from asyncrl.chat.messages import Message, Reply, ToolCall

__all__ = ["ChatFormat", "Message", "Reply", "ToolCall"]
