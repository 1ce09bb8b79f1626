"""A chat in the terminal: turns, streaming, and an answer that Ctrl-C ends without ending the chat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from client.client import Client
from client.errors import ClientError
from client.terminal import note, note_error, note_finished, write_answer
from client.types import Delta, Finished, Message, Sampling
from common.types import Band, Reason

COMMANDS = "/reset forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C ends a running answer"


@dataclass(slots=True)
class Conversation:
    """Turns so far and how to ask for the next."""

    client: Client
    sampling: Sampling
    model: str = ""
    band: Band | None = None
    timeout_s: float | None = None
    system: str = ""
    turns: list[Message] = field(default_factory=list)

    async def answer(self, text: str) -> Finished | None:
        """Stream the answer to the next turn and remember both.

        What was answered before a failure or a cancellation is remembered; a turn without any answer is forgotten.
        None if the stream ended without a finish.
        """
        system = [Message("system", self.system)] if self.system else []
        asked = Message("user", text)
        parts: list[str] = []
        finished = None
        stream = self.client.chat(
            [*system, *self.turns, asked],
            self.sampling,
            model=self.model,
            band=self.band,
            timeout_s=self.timeout_s,
        )
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        parts.append(event.text)
                        write_answer(event.text)
                    elif isinstance(event, Finished):
                        finished = event
        finally:
            if parts:
                self.turns += [asked, Message("assistant", "".join(parts))]
                write_answer("\n")
        return finished


def talk(conversation: Conversation, runner: asyncio.Runner, read_line: Callable[[str], str]) -> None:
    """Ask for turns until the user leaves. Failures are shown and the chat goes on."""
    with suppress(ImportError):
        import readline  # noqa: F401 - its presence gives `input` editing and history
    note(COMMANDS)
    while True:
        try:
            line = read_line("> ").strip()
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note("")
            note(COMMANDS)
            continue
        if line in {"/quit", "/exit"}:
            return
        if line == "/reset":
            conversation.turns.clear()
            note("[forgotten]")
        elif line.startswith("/"):
            note(COMMANDS)
        elif line:
            _turn(conversation, runner, line)


def _turn(conversation: Conversation, runner: asyncio.Runner, line: str) -> None:
    try:
        finished = runner.run(conversation.answer(line))
        if finished is not None:
            note_finished(finished)
    except KeyboardInterrupt:
        note("[cancelled]")
    except ClientError as error:
        note_error(error)
        if error.reason is Reason.PROMPT_TOO_LONG:
            note("  /reset starts anew", style="red")
