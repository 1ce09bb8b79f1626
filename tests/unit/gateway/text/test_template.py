"""Chat templates: what Hugging Face templates expect, refusals, bounds."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from common.errors import InvalidRequestError
from common.types import Reason
from gateway.text.template import ChatTemplate

USER = {"role": "user", "content": " hi <é> "}


def render(source: str, *messages: dict[str, str]) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: datetime(1971, 1, 1, tzinfo=UTC))
    return template.render(messages or [USER])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": " hi <é> "}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "01 Jan 1971"),
        ("{{ bos_token + messages[0].content | trim ~ eos_token }}", "<s>hi <é></s>"),
        (
            "{% if tools is not none or documents is not none %}tools{% endif %}{% if not tools %}none{% endif %}",
            "none",
        ),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% for i in [1, 2, 3] if i != 2 %}{{ i }}{{ loop.length }}{% else %}none{% endfor %}", "1232"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('a' ~ 1) }}", "a1a1"),
        ("{{ messages[0].missing }}|{{ missing }}", "|"),
        ("{{ 'a' ~ ('b' ~ 'c') }}{{ ['x' ~ 'y'][0] }}{{ dict(k='p' ~ 'q').k }}", "abcxypq"),
        ("{{ '-' * 3 }}{{ 2 ** 3 }}{{ 7 % 4 }}", "---83"),
    ],
)
def test_renders_as_hugging_face_does(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "no chat template"),
        ("{% broken", "cannot be compiled"),
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 'a' + 1 }}", "refused the messages"),
        ("{{ messages[0].update({'role': 'system'}) }}", "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('long ' * 1000) }}", r"long \.\.\.$"),
    ],
)
def test_refusals_are_template_errors(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render(source)
    assert caught.value.reason is Reason.TEMPLATE_ERROR
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "loop rounds"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "loop rounds and macro calls",
        ),
        ("{% for i in range(9) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}", "loop rounds"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "characters of output"),
        (
            "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "value of more",
        ),
        (
            "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "a text of more",
        ),
        ("{{ 'x' * 10 ** 12 }}", "repetition"),
        ("{{ [0] * 10 ** 12 }}", "repetition"),
        ("{{ 9 ** 99999 }}", "4096 bits"),
        ("{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", "4096 bits"),
    ],
)
def test_runaway_templates_are_bounded(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render(source)
    assert caught.value.reason is Reason.TEMPLATE_ERROR


def test_long_conversations_are_within_the_bounds() -> None:
    source = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 1000}] * 5000
    assert len(render(source, *messages)) == 5000 * 1006
