"""What is asked, and what an undisturbed cluster has answered to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from client import Client, Delta, Finished, Sampling, Text
from common.types import FinishReason

NUM_TOKENS = 400
_TEXTS = (
    "The quick brown fox jumps over",
    "def main(argument: int) -> None:",
    "Größe, naïve café",
    "one two three four five six seven eight nine ten eleven twelve thirteen",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, how it is to be gone on with, and the whole answer."""

    prompt: str
    sampling: Sampling
    text: str = ""
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    reason: FinishReason | None = None

    @property
    def longest_text(self) -> str:
        """The most that a call ended early can get: its end also tells what was held back of a stop string begun."""
        return self.text + "".join(self.sampling.stop)[:-1]


def _plain() -> list[Question]:
    greedy = Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    drawn = Sampling(temperature=0.9, top_p=0.95, max_tokens=NUM_TOKENS, ignore_eos=True)
    penalized = replace(drawn, repetition_penalty=1.1, presence_penalty=0.3, top_k=40)
    return [
        Question(text, replace(sampling, seed=number))
        for number, text in enumerate(_TEXTS)
        for sampling in (greedy, drawn, penalized)
    ]


def _stopped(question: Question) -> Question:
    """The same, ended by a stop string that its answer has at about two thirds, over the border of two tokens."""
    start = len(question.text) * 2 // 3
    stop = question.text[start : start + 5]
    return Question(question.prompt, replace(question.sampling, stop=(stop,)))


async def _answered(client: Client, question: Question) -> Question:
    text, token_ids = "", ()
    async for event in client.generate(Text(question.prompt), question.sampling, return_token_ids=True):
        if isinstance(event, Delta):
            text += event.text
            token_ids += event.token_ids
        if isinstance(event, Finished):
            return replace(question, text=text, token_ids=token_ids, reason=event.reason)
    raise AssertionError("no end")


async def ask_all(client: Client) -> list[Question]:
    """All questions with their answers."""
    plain = await asyncio.gather(*(_answered(client, question) for question in _plain()))
    stopped = await asyncio.gather(*(_answered(client, _stopped(question)) for question in plain[::2]))
    for question in stopped:
        whole = next(
            it for it in plain if (it.prompt, it.sampling) == (question.prompt, replace(question.sampling, stop=()))
        )
        assert question.reason is FinishReason.STOP
        assert question.text == whole.text[: whole.text.index(question.sampling.stop[0])]
    return [*plain, *stopped]
