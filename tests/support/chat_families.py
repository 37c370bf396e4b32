"""Chat models of several families without their weights: the template, and a byte-level tokenizer with their tokens.

Where TRL ships a family's own template, it is taken; the others are written here, with what matters of the originals.
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from asyncrl.chat import ChatFormat
from asyncrl.data.tokenizer import Tokenizer, load_tokenizer

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens of their own, and no special ones: decoding never leaves them out."""
LLAMA_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|python_tag|>",
)  # fmt: skip
MISTRAL_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]",
)  # fmt: skip
HARMONY_TOKENS = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>",
)  # fmt: skip

HERMES = """
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\nYou are a function calling AI model. Here are the available tools: <tools>' }}
    {%- for tool in tools %}{{ ' ' ~ (tool.function | tojson) }}{% endfor %}
    {{- ' </tools>For each function call return a JSON object within <tool_call></tool_call> tags.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('user', 'system') or (message.role == 'assistant' and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>tool\\n' }}{% endif %}
        {{- '<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response>\\n' if not loop.last else '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""As Hermes 2 Pro's: what follows the last tool result depends on whether it is the last."""

MISTRAL = """
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content, messages[1:] %}
{%- endif %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or message.tool_calls is defined) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + ((system + '\\n\\n') if loop.last and system is defined else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
"""As Mistral Nemo's: tools and system message stand before the last user message, ids of nine letters."""

MINISTRAL = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
"""As Ministral 3's and Devstral 2's."""


@dataclass(frozen=True)
class Family:
    template: str
    """The text, or the name of a file of TRL's."""
    tokens: tuple[str, ...]
    bos: str
    ends: tuple[str, ...]
    tool_format: str
    tags: tuple[str, ...] = ()
    reasoning: bool = False
    content_with_calls: bool = True
    """Its template shows both in one message."""
    calls: int = 3
    """Most in one message."""
    changes: str = ""
    """What the template does to the history, in the words of `not_append_only`."""

    def save(self, directory: Path) -> Path:
        source = self.template
        if source.endswith(".jinja"):
            source = files("trl").joinpath("chat_templates", source).read_text(encoding="utf-8")
        backend = _byte_level()
        backend.add_special_tokens(list(self.tokens))
        backend.add_tokens([AddedToken(tag, special=False) for tag in self.tags])
        backend.save(str(directory / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": self.bos, "eos_token": self.ends[0]}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        ends = [backend.token_to_id(end) for end in self.ends]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        (directory / "chat_template.jinja").write_text(source, encoding="utf-8")
        return directory

    def load(self, directory: Path) -> tuple[Tokenizer, ChatFormat]:
        tokenizer = load_tokenizer(self.save(directory))
        return tokenizer, ChatFormat(tokenizer)


def _byte_level() -> tokenizers.Tokenizer:
    """All bytes, and a few hundred merges, so that the place where two texts meet matters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([HERMES, MISTRAL, MINISTRAL, __doc__ or ""], trainer)
    return backend


OLD_REASONING = "leaves out the reasoning of turns before the last user message"
FAMILIES = {
    "qwen2.5": Family(
        "qwen2_5.jinja", CHATML_TOKENS, "<|endoftext|>", ("<|im_end|>", "<|endoftext|>"), "hermes", QWEN_TAGS
    ),
    "qwen3": Family(
        "qwen3.jinja", CHATML_TOKENS, "<|endoftext|>", ("<|im_end|>", "<|endoftext|>"), "hermes", QWEN_TAGS,
        reasoning=True, changes=OLD_REASONING,
    ),
    "qwen3-training": Family(
        "qwen3_training.jinja", CHATML_TOKENS, "<|endoftext|>", ("<|im_end|>",), "hermes", QWEN_TAGS, reasoning=True
    ),
    "qwen3.6": Family(
        "qwen3_6.jinja", CHATML_TOKENS, "<|endoftext|>", ("<|im_end|>",), "qwen3_coder", QWEN_TAGS, reasoning=True,
        changes=OLD_REASONING,
    ),
    "qwen3.6-training": Family(
        "qwen3_6_training.jinja", CHATML_TOKENS, "<|endoftext|>", ("<|im_end|>",), "qwen3_coder", QWEN_TAGS,
        reasoning=True,
    ),
    "hermes": Family(
        HERMES, CHATML_TOKENS, "<|endoftext|>", ("<|im_end|>",), "hermes", content_with_calls=False,
        changes="shows earlier tool calls and their results in another way",
    ),
    "llama3.1": Family(
        "llama3_1.jinja", LLAMA_TOKENS, "<|begin_of_text|>", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        "llama3_json", content_with_calls=False, calls=1,
    ),
    "mistral": Family(
        MISTRAL, MISTRAL_TOKENS, "<s>", ("</s>",), "mistral", content_with_calls=False,
        changes="moves the system message",
    ),
    "ministral": Family(MINISTRAL, MISTRAL_TOKENS, "<s>", ("</s>",), "mistral"),
    "gpt-oss": Family(
        "gptoss.jinja", HARMONY_TOKENS, "<|startoftext|>", ("<|return|>", "<|endoftext|>", "<|call|>"), "harmony",
        reasoning=True, content_with_calls=False, calls=1, changes=OLD_REASONING,
    ),
}  # fmt: skip
