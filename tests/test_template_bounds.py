"""Chat templates that would run for ever, or fill the memory, end with an error."""

from __future__ import annotations

import time

import pytest

from pagedattn.errors import UserError
from pagedattn.text import bounds
from pagedattn.text.template import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]
LOOP = "{% for i in range(99999) %}"


def render(source: str) -> str:
    return ChatTemplate(source).render(HI)


@pytest.mark.parametrize(
    "source",
    [
        LOOP * 3 + "{% endfor %}" * 3,
        LOOP * 2 + "{% set x = i * 2 %}" + "{% endfor %}" * 2,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
        "{% endmacro %}{{ f(60) }}",
        LOOP * 2 + "x" + "{% endfor %}" * 2,
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ [1] * 1000000000 }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'.zfill(width=1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 10 ** 10 ** 8 }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
        "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    ],
)
def test_bounded_in_time_and_size(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(UserError, match="chat template") as refusal:
        render(source)
    assert time.monotonic() - start < 5
    assert refusal.value.param == "messages"


def test_what_templates_really_do_is_within_bounds() -> None:
    source = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{{ loop.index }} "
        "{{ loop.length }} {{ loop.last }}{% set ns.t = ns.t + m.content %}"
        "{% for k, v in m.items() %}{{ k }}{% endfor %}{% endfor %}{{ ns.t * 2 }}"
        "{{ '%s!' | format('a') }}{{ 'a' | center(3) }}{% for x in none_such %}"
        "{% else %}none{% endfor %}{{ 7 % 4 }}{{ 2 ** 10 }}"
    )
    assert render(source) == "1 1 TruerolecontentHiHia! a none31024"


def test_a_template_can_not_set_its_own_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.2)
    with pytest.raises(UserError, match="longer than"):
        render("{% set _budget = none %}" + LOOP * 2 + "{% endfor %}" * 2)


def test_long_conversations_are_no_attack() -> None:
    talk = [{"role": "user", "content": "x" * 100} for _ in range(20_000)]
    source = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"
    assert len(ChatTemplate(source).render(talk)) == 20_000 * 101
