"""Conversations with tools, in the tokens of one model: chat templates, tool calls and reasoning."""

from asyncrl.chat.format import ChatFormat
from asyncrl.chat.messages import Message, Reply, ToolCall
from asyncrl.chat.plain import PlainFormat, chat_format

__all__ = ["ChatFormat", "Message", "PlainFormat", "Reply", "ToolCall", "chat_format"]
