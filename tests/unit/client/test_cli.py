"""The command line, in this process, against a gateway in another thread."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from typer.testing import CliRunner

from client import Client, Sampling
from client.cli import app
from client.conversation import Conversation, talk
from client.terminal import write_answer
from common.errors import InvalidRequestError, LimitExceededError, TidegateError, UnauthenticatedError
from common.rpc.status import to_rich_status
from common.types import Reason
from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.unit.client.scripted import accepted, delta, finished


class Gateway(inference_pb2_grpc.InferenceServicer):
    """Echoes the last turn; some words make it do something else."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.has_ended = threading.Event()
        self.error: TidegateError | None = None

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        self.requests.append(request)
        if self.error is not None:
            context.abort_with_status(rpc_status.to_status(to_rich_status(self.error)))
        text = request.text or request.chat.messages[-1].content
        if text == "interrupt me":
            context.add_callback(self.has_ended.set)
        yield accepted()
        yield delta("you said ")
        if text == "interrupt me":
            self.has_ended.wait(60)
            return
        yield delta(text)
        yield finished()

    def CountTokens(self, request: Any, context: Any) -> Any:
        return inference_pb2.CountTokensResponse(num_tokens=10 + len(request.chat.messages), context_length=8192)

    def ListModels(self, request: Any, context: Any) -> Any:
        model = inference_pb2.Model(name="[m]", context_length=9, vocab_size=8, num_workers=1)
        return inference_pb2.ListModelsResponse(models=[model])

    def Complete(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def Cancel(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def address(gateway: Gateway) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
    servicer = health.HealthServicer()
    servicer.set("inference.v1.Inference", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def _interrupting(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user presses Ctrl-C on seeing the first words of an answer to "interrupt me"."""

    def write_and_interrupt(text: str) -> None:
        write_answer(text)
        if text == "you said " and gateway.requests[-1].chat.messages[-1].content == "interrupt me":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("client.conversation.write_answer", write_and_interrupt)


def run(*arguments: str, text: str | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=text)


def test_one_shot_chat_writes_the_answer_and_nothing_else_to_stdout(gateway: Gateway, address: str) -> None:
    result = run("chat", "-a", address, "-p", "hello", "-s", "be brief", "--temperature", "0", "--stop", "x",
                 "--kv-window-tokens", "512", "--kv-sink-tokens", "8", "-v")  # fmt: skip
    assert (result.exit_code, result.stdout) == (0, "you said hello\n")
    assert "3 prompt tokens (1 cached), 2 generated, first after 1.00 s, then 1 tokens/s, stop" in result.stderr
    request = gateway.requests[0]
    assert [(each.role, each.content) for each in request.chat.messages] == [("system", "be brief"), ("user", "hello")]
    assert request.sampling.temperature == 0
    assert request.sampling.stop == ["x"]
    assert (request.sampling.kv_window_tokens, request.sampling.kv_sink_tokens) == (512, 8)
    assert not request.sampling.HasField("top_p")


def test_prompt_from_standard_input_and_address_from_the_environment(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_ADDRESS", address)
    assert run("complete", "-", text="piped").stdout == "you said piped\n"


def test_count_models_and_health(address: str) -> None:
    assert run("count", "some text", "-a", address).stdout == "10\n"
    assert run("count", "some text", "--chat", "-a", address).stdout == "11\n"
    assert "[m]" in run("models", "-a", address).stdout
    assert '"num_workers": 1' in run("models", "--json", "-a", address).stdout
    health_result = run("health", "-a", address)
    assert (health_result.exit_code, health_result.stdout) == (0, "SERVING\n")


@pytest.mark.parametrize(
    ("error", "exit_code", "words"),
    [
        (
            InvalidRequestError.of_field("sampling.top_p", "it is 2; allowed is 0 to 1"),
            1,
            ["INVALID_ARGUMENT", "0 to 1"],
        ),
        (UnauthenticatedError("nobody has this key"), 1, ["UNKNOWN_CREDENTIAL", "TIDEGATE_API_KEY"]),
        (LimitExceededError("queue is full", retry_after_s=2.5), 3, ["QUEUE_FULL", "try again in 2.5 s"]),
    ],
)
def test_errors_are_told_and_decide_the_exit_code(
    gateway: Gateway, address: str, error: TidegateError, exit_code: int, words: list[str]
) -> None:
    gateway.error = error
    result = run("chat", "-a", address, "-p", "x", "-k", "secret-key")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert all(word in result.stderr for word in words)
    assert "secret-key" not in result.output
    assert "Traceback" not in result.output


def test_nobody_listens() -> None:
    result = run("models", "-a", "127.0.0.1:1")
    assert result.exit_code == 3
    assert "is the gateway running" in result.stderr


def test_key_that_cannot_be_sent_is_wrong_usage(address: str) -> None:
    assert run("models", "-a", address, "-k", "a\nb").exit_code == 2


@pytest.mark.usefixtures("_interrupting")
def test_interrupted_one_shot_cancels_the_request(gateway: Gateway, address: str) -> None:
    result = run("chat", "-a", address, "-p", "interrupt me")
    assert (result.exit_code, result.stdout) == (130, "you said \n")
    assert gateway.has_ended.wait(60)


def lines(*typed: str | type[BaseException]) -> Callable[[str], str]:
    remaining = list(typed)

    def read_line(_: str) -> str:
        if not remaining:
            raise EOFError
        line = remaining.pop(0)
        if isinstance(line, str):
            return line
        raise line

    return read_line


def talked(address: str, *typed: str | type[BaseException]) -> Conversation:
    async def connect() -> Client:
        return Client(address)

    with asyncio.Runner() as runner:
        client = runner.run(connect())
        conversation = Conversation(client, Sampling())
        talk(conversation, runner, lines(*typed))
        runner.run(client.close())
    return conversation


def test_conversation_remembers_its_turns(gateway: Gateway, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talked(address, "one", "", "two", "/quit", "never")
    assert [turn.content for turn in conversation.turns] == ["one", "you said one", "two", "you said two"]
    assert len(gateway.requests[1].chat.messages) == 3
    assert capsys.readouterr().out == "you said one\nyou said two\n"


def test_reset_forgets_and_unknown_commands_are_not_sent(gateway: Gateway, address: str) -> None:
    talked(address, "one", "/reset", "/what", "two")
    assert [len(request.chat.messages) for request in gateway.requests] == [1, 1]


@pytest.mark.usefixtures("_interrupting")
def test_interrupt_ends_the_answer_and_not_the_chat(
    gateway: Gateway, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = talked(address, KeyboardInterrupt, "interrupt me", "go on")
    assert gateway.has_ended.wait(60)
    assert "[cancelled]" in capsys.readouterr().err
    assert [turn.content for turn in conversation.turns] == ["interrupt me", "you said ", "go on", "you said go on"]


def test_failed_turn_is_shown_and_forgotten(gateway: Gateway, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.error = InvalidRequestError("too long", reason=Reason.PROMPT_TOO_LONG)
    assert talked(address, "one").turns == []
    assert "/reset starts anew" in capsys.readouterr().err


def test_terminal_gets_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_answer("\x1b[2J\ta\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    write_answer("\x1b[2J\ta\x9b\n")
    assert capsys.readouterr().out == "\x1b[2J\ta\n" + "\ufffd[2J\ta\ufffd\n"
