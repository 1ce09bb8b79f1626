"""Prompts to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.placement.model import ServedModel
from gateway.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt, check_prompt_length

_Result = TypeVar("_Result")

# Up to about this many characters tokenizing takes less time than handing it to a thread and back.
_INLINE_CHARACTERS = 2_000
_MESSAGE_CHARACTERS = 20


class PromptReader:
    """Tokenizes; long prompts in threads of its own, so that they wait for each other and not everybody for them."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def read(self, prompt: Prompt, model: ServedModel) -> tuple[int, ...]:
        """The token ids of a checked prompt. Raises InvalidRequestError; PROMPT_TOO_LONG at once if it is certain."""
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        if _size_of(prompt) <= _INLINE_CHARACTERS:
            return _encode(prompt, model)
        return await self._in_thread(lambda: _encode_long(prompt, model))

    async def count(self, prompt: ChatPrompt | TextPrompt, model: ServedModel) -> int:
        """How many tokens a checked prompt has, be it longer than the context or not."""
        if _size_of(prompt) <= _INLINE_CHARACTERS:
            return len(_encode(prompt, model))
        return await self._in_thread(lambda: len(_encode(prompt, model)))

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _size_of(prompt: ChatPrompt | TextPrompt) -> int:
    """Characters, and for each message about as many as the template adds."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return sum(len(role) + len(content) + _MESSAGE_CHARACTERS for role, content in prompt.messages)


def _encode(prompt: ChatPrompt | TextPrompt, model: ServedModel) -> tuple[int, ...]:
    if isinstance(prompt, TextPrompt):
        return tuple(model.text.encode_text(prompt.text))
    return tuple(model.text.encode_chat(prompt.messages))


def _encode_long(prompt: ChatPrompt | TextPrompt, model: ServedModel) -> tuple[int, ...]:
    texts = (prompt.text,) if isinstance(prompt, TextPrompt) else (content for _, content in prompt.messages)
    bound = model.text.min_tokens("".join(texts))
    check_prompt_length(bound, model.limits, is_lower_bound=True)
    return _encode(prompt, model)
