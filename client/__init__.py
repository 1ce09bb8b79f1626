"""The Python client of Tidegate and its command line (`python -m client`)."""

from client.client import Client, ClientOptions
from client.errors import ClientError
from client.jobs import Job
from client.types import (
    Accepted,
    Chat,
    Completion,
    Delta,
    Event,
    Finished,
    Message,
    Model,
    PositionLogprobs,
    Prompt,
    Sampling,
    Text,
    Timing,
    TokenCount,
    TokenLogprob,
    Tokens,
)

__all__ = [
    "Accepted",
    "Chat",
    "Client",
    "ClientError",
    "ClientOptions",
    "Completion",
    "Delta",
    "Event",
    "Finished",
    "Job",
    "Message",
    "Model",
    "PositionLogprobs",
    "Prompt",
    "Sampling",
    "Text",
    "Timing",
    "TokenCount",
    "TokenLogprob",
    "Tokens",
]
