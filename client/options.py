"""Options that several commands have, as groups: a command's parameter of a group's type stands for all its options."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from client.admin import AdminClient
from client.client import Client
from client.connection import connect, failures, secured
from client.terminal import write_answer
from client.types import Sampling

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)

Address = Annotated[
    str, typer.Option("--address", "-a", envvar="TIDEGATE_ADDRESS", help="The gateway, HOST:PORT.", show_envvar=True)
]
ApiKey = Annotated[
    str, typer.Option("--api-key", "-k", envvar="TIDEGATE_API_KEY", help="The tenant's key.", show_default=False)
]
AdminKey = Annotated[
    str, typer.Option("--admin-key", envvar="TIDEGATE_ADMIN_KEY", help="The operators' key.", show_default=False)
]
Tls = Annotated[bool, typer.Option("--tls", help="Connect with TLS, trusting the system's authorities.")]
TimeoutS = Annotated[float | None, typer.Option("--timeout", min=0.001, help="Seconds for the whole call.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: JSON, one object a line.")]

DEFAULT_ADDRESS = "127.0.0.1:50051"


class BandName(StrEnum):
    """A band as the user names it."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class OptionGroup:
    """Base of dataclasses whose fields are options."""


@dataclass(frozen=True, slots=True)
class Gateway(OptionGroup):
    """Where to connect, without a key."""

    address: Address = DEFAULT_ADDRESS
    timeout: TimeoutS = 10.0
    tls: Tls = False

    def call(self, call: Callable[[Client], Awaitable[_T]]) -> _T:
        """Connects, calls, and says what went wrong, if anything did."""
        return _call(self.address, "", self.tls, call)


@dataclass(frozen=True, slots=True)
class TenantAccess(OptionGroup):
    """Where to connect, and as whom."""

    address: Address = DEFAULT_ADDRESS
    api_key: ApiKey = ""
    timeout: TimeoutS = 10.0
    tls: Tls = False

    def call(self, call: Callable[[Client], Awaitable[_T]]) -> _T:
        """Connects, calls, and says what went wrong, if anything did."""
        return _call(self.address, self.api_key, self.tls, call)


def _call(address: str, api_key: str, tls: bool, call: Callable[[Client], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        async with await connect(address, api_key, tls) as client:
            return await call(client)

    with failures():
        return asyncio.run(run())


@dataclass(frozen=True, slots=True)
class AdminAccess(OptionGroup):
    """Where an operator connects, and how the answer is written."""

    address: Address = DEFAULT_ADDRESS
    admin_key: AdminKey = ""
    timeout: TimeoutS = 10.0
    tls: Tls = False
    as_json: AsJson = False

    def report(self, call: Callable[[AdminClient], Awaitable[_M]], write: Callable[[_M], None]) -> None:
        """Connects, calls, and writes the answer: by `write`, or as JSON."""

        async def run() -> _M:
            with secured(self.tls) as (credentials, options):
                client = AdminClient(
                    self.address, self.admin_key, options=options, credentials=credentials, timeout_s=self.timeout
                )
            async with client:
                return await call(client)

        with failures():
            answer = asyncio.run(run())
        if self.as_json:
            named = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            write_answer(json.dumps(named) + "\n")
        else:
            write(answer)


@dataclass(frozen=True, slots=True)
class SamplingOptions(OptionGroup):
    """How the next token is chosen, and when an answer ends."""

    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [0, 100]")] = None
    top_k: Annotated[int | None, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = None
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set of this total probability. [0, 1]")] = None
    min_p: Annotated[float | None, typer.Option(help="Keep tokens this probable beside the best. [0, 1]")] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 discourages tokens already seen. (0, 10]")
    ] = None
    presence_penalty: Annotated[float | None, typer.Option(help="Discourages tokens already generated. [-2, 2]")] = None
    frequency_penalty: Annotated[float | None, typer.Option(help="The same for each time. [-2, 2]")] = None
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", min=1, help="Most tokens of the answer.")] = (
        None
    )
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same answer.")] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="Ends the answer before this text; may be given up to 16 times.")
    ] = None

    kv_window_tokens: Annotated[
        int | None,
        typer.Option("--kv-window-tokens", min=1, help="Tokens that a token sees of its own sequence."),
    ] = None
    kv_sink_tokens: Annotated[
        int | None,
        typer.Option("--kv-sink-tokens", min=0, help="First tokens that stay visible besides the window."),
    ] = None

    def sampling(self) -> Sampling:
        """As a client takes it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Sampling(**{**values, "stop": self.stop or ()})


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a command. Each parameter that is an `OptionGroup` becomes the options of the group, with the values of
    its default as their defaults."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        app.command(name)(_expanded(function))
        return function

    return register


def _expanded(function: Callable[..., None]) -> Callable[..., None]:
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(function).parameters.values():
        hint = hints[each.name]
        if isinstance(hint, type) and issubclass(hint, OptionGroup):
            groups[each.name] = hint
            of_group = get_type_hints(hint, include_extras=True)
            for field in fields(hint):  # type: ignore[arg-type]  # groups are dataclasses
                default = getattr(each.default, field.name)
                parameters.append(each.replace(name=field.name, default=default, annotation=of_group[field.name]))
        else:
            parameters.append(each.replace(annotation=hint))

    def run(**values: Any) -> None:
        given = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        function(**given, **values)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
