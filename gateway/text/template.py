"""Render a model's chat template the way Hugging Face templates expect, inside a sandbox and within bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequestError
from common.types import Reason

MAX_STEPS = 100_000
"""Loop rounds and macro calls of one rendering; a conversation needs a few per message."""

MAX_EXTRA_CHARS = 1_000_000
"""Characters that a template may add to twice the conversation's own."""

_MAX_MESSAGE_CHARS = 300
_MAX_BITS = 4096
_TICK = "__tidegate_tick"
_CONCAT = "__tidegate_concat"

# What a template's own code can raise; anything else is a fault of ours and is not hidden.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class _OutOfBoundsError(jinja2.TemplateError):
    """A template that does not end, or makes too much."""


class ChatTemplate:
    """A compiled chat template. Rendering is pure: the same messages at the same date give the same text."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str, now: Callable[[], datetime]) -> None:
        """A broken or empty `source` is reported by `render`: a model without a template still serves plain text."""
        self._variables: dict[str, Any] = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "add_generation_prompt": True,
            # Templates ask `is not none` of these, so undefined would not do.
            "tools": None,
            "documents": None,
            "strftime_now": lambda pattern: now().strftime(pattern),
        }
        self._template: jinja2.Template | None = None
        self._fault = "this model has no chat template; send plain text or token ids"
        if source:
            try:
                self._template = _compile(source)
            except _TEMPLATE_FAULTS as error:
                self._fault = f"the model's chat template cannot be compiled: {_message(error)}"

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation up to where the assistant's answer begins.

        Raises InvalidRequestError (TEMPLATE_ERROR) if there is no template, or it refuses the messages, or it exceeds
        MAX_STEPS or its share of characters.
        """
        if self._template is None:
            raise _template_error(self._fault)
        max_chars = MAX_EXTRA_CHARS + 2 * sum(len(message["content"]) for message in messages)
        budget = _Budget(MAX_STEPS, max_chars)
        variables = self._variables | {"messages": list(messages), _TICK: budget.tick, _CONCAT: budget.concat}
        parts: list[str] = []
        try:
            for part in self._template.generate(variables):
                budget.charge(len(part))
                parts.append(part)
        except _TEMPLATE_FAULTS as error:
            raise _template_error(f"the model's chat template refused the messages: {_message(error)}") from error
        return "".join(parts)


def _template_error(message: str) -> InvalidRequestError:
    return InvalidRequestError.of_field("chat.messages", message, Reason.TEMPLATE_ERROR)


def _message(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "..."


class _Budget:
    """What one rendering may still use."""

    def __init__(self, max_steps: int, max_chars: int) -> None:
        self._steps_left = max_steps
        self._chars_left = max_chars
        self._max_chars = max_chars

    def tick(self) -> str:
        """Count one round of a loop or one call of a macro."""
        self._steps_left -= 1
        if self._steps_left < 0:
            raise _OutOfBoundsError(f"more than {MAX_STEPS} loop rounds and macro calls")
        return ""

    def charge(self, num_chars: int) -> None:
        """Count characters of output."""
        self._chars_left -= num_chars
        if self._chars_left < 0:
            raise _OutOfBoundsError(f"more than {self._max_chars} characters of output")

    def concat(self, *values: object) -> str:
        """The `~` operator, bounded."""
        texts = [str(value) for value in values]
        if sum(map(len, texts)) > self._max_chars:
            raise _OutOfBoundsError(f"a text of more than {self._max_chars} characters")
        return "".join(texts)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with the operators bounded that a loop can make grow without end."""

    intercepted_binops = frozenset({"+", "*", "**"})
    max_operand_chars = 64 * MAX_EXTRA_CHARS

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an intercepted operator within bounds."""
        size = sum(len(side) for side in (left, right) if isinstance(side, str | list | tuple))
        numbers = [side for side in (left, right) if isinstance(side, int)]
        if operator == "+" and size > self.max_operand_chars:
            raise _OutOfBoundsError(f"a value of more than {self.max_operand_chars} characters or items")
        if operator == "*" and size and numbers and size * numbers[0] > MAX_EXTRA_CHARS:
            raise _OutOfBoundsError(f"a repetition of more than {MAX_EXTRA_CHARS} characters or items")
        if operator != "+" and len(numbers) == 2:
            num_bits = left.bit_length() * (abs(right) if operator == "**" else 1)
            if max(num_bits, right.bit_length()) > _MAX_BITS:
                raise _OutOfBoundsError(f"a number of more than {_MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the declared type of the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    """Compile with every loop round and macro call counted, so that no template runs for ever.

    A template is the operator's choice, as the model is: the bounds are against its mistakes, the sandbox against more.
    """
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    tree = environment.parse(source)
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
        node.body.insert(0, nodes.Output([_call(_TICK, [])]))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(nodes.Not(_call(_TICK, [])), node.test)
    _bound_concatenation(tree)
    tree.set_environment(environment)
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)


def _bound_concatenation(node: nodes.Node) -> None:
    """Replace every `a ~ b` below `node` by a call that knows the budget."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(node, field, _call(_CONCAT, value.nodes))
        elif isinstance(value, list):
            value[:] = [_call(_CONCAT, item.nodes) if isinstance(item, nodes.Concat) else item for item in value]
    for child in node.iter_child_nodes():
        _bound_concatenation(child)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a model, not for a web page: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
