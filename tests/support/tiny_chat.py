"""A tiny random chat model: Llama's shape, a byte-level tokenizer, ChatML, and answers that a random model finds."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from tests.support.tiny_model import tiny_checkpoint

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ bos_token + 'system\nYou are a tiny model" + END + "\n' }}{% endif %}"
    "{{ bos_token + message['role'] + '\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
"""As SmolLM2's: a system message of the model's own when the user gives none."""


def save_chat_tokenizer(directory: Path, template: str | None = CHATML) -> None:
    """One token per byte, the two marks of a turn, and whole answers from 0 to 9."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([START, END])
    backend.add_tokens([f"<answer>{digit}</answer>" for digit in range(10)])
    backend.save(str(directory / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": END, "special": True}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": START, "eos_token": eos}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)


def chat_ids(directory: Path, *turns: str, system: str = "") -> list[int]:
    """What transformers makes of the user's and the model's turns, up to where the model's next one begins."""
    said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    messages = [{"role": "system", "content": system}] * bool(system) + said
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def tiny_chat_model(directory: Path) -> Path:
    tiny_checkpoint(directory, "llama", vocab_size=268, max_position_embeddings=1024, eos_token_id=257)
    save_chat_tokenizer(directory)
    return directory
