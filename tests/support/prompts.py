"""Twenty prompts of many lengths and kinds, as token ids, for comparing the real model with its reference."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

SYSTEM = (
    "You are a careful assistant of a hardware shop. Answer in full sentences, name the product that you mean, and say "
    "so plainly when you do not know something. Prices are in euros and include taxes. Never invent an order number."
)
STORY = (
    "The lighthouse keeper counted the ships that passed on the first day of winter. There were eleven of them, all "
    "heading south, and none of them answered his lamp. In the evening he wrote the number into the book, as his "
    "father had done, and went down to the cellar to look after the oil. "
)
CODE = '''def merge(left: list[int], right: list[int]) -> list[int]:
    """Merges two sorted lists."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]


'''
UNICODE = "Grüße aus Köln! 東京の天気は晴れです。 Привет, мир. مرحبا بالعالم 🌊🚦🏳️‍🌈 naïve café — ½ € ≠ ∞ "


@dataclass(frozen=True, slots=True)
class Prompt:
    """A named prompt and how many tokens are generated from it."""

    name: str
    token_ids: tuple[int, ...]
    num_output: int


def chat(system: str, *turns: str) -> str:
    """A conversation in the model's chat format, ending where the assistant is to speak; turns alternate."""
    roles = ("user", "assistant")
    text = f"<|im_start|>system\n{system}<|im_end|>\n"
    for index, turn in enumerate(turns):
        text += f"<|im_start|>{roles[index % 2]}\n{turn}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def real_prompts(tokenizer: Tokenizer, *, seed: int = 7) -> list[Prompt]:
    """The twenty prompts; lengths around multiples of block sizes are cut to be exact."""
    rng = random.Random(seed)

    def text(name: str, content: str, num_output: int = 32, cut: int | None = None) -> Prompt:
        token_ids = tuple(tokenizer.encode(content, add_special_tokens=False).ids[:cut])
        assert cut is None or len(token_ids) == cut, f"{name} has only {len(token_ids)} tokens"
        return Prompt(name, token_ids, num_output)

    def drawn(name: str, num_tokens: int, num_output: int = 32) -> Prompt:
        return Prompt(name, tuple(rng.randrange(100, 40_000) for _ in range(num_tokens)), num_output)

    return [
        text("five tokens", "The capital of France is", 64, cut=5),
        text("chat", chat(SYSTEM, "Which screws hold in plaster?"), 64),
        text("chat, same system prompt", chat(SYSTEM, "Do you sell ladders of more than 4 metres?")),
        text("chat, several turns", chat(SYSTEM, "Hello", "Good morning! How can I help?", "I need paint." * 3)),
        text("chat, other system prompt", chat("Answer in rhymes.", "Why is the sea salty?"), 48),
        text("code", CODE + "def merge_sort(", 64),
        text("long code", CODE * 6 + "def quick_sort("),
        text("json", '{"orders": [' + ", ".join(f'{{"id": {i}, "total": {i * 7}.50}}' for i in range(40))),
        text("one word again and again", "ripe " * 200),
        text("a pattern", "one two three four five six seven eight nine ten " * 20),
        text("unicode", UNICODE * 4),
        text("digits", " ".join(str(rng.randrange(10_000)) for _ in range(120))),
        text("one block of 16", STORY, cut=16),
        text("a token less than 64", STORY * 2, cut=63),
        text("64 tokens", STORY * 2, cut=64),
        text("a token more than 64", STORY * 2, cut=65),
        text("512 tokens", STORY * 10, cut=512),
        text("long story", STORY * 24, 32, cut=1500),
        drawn("random tokens", 300),
        drawn("many random tokens", 1100),
    ]
