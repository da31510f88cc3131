"""Structured outputs over HTTP: `response_format` and `structured_outputs`.

The tiny model says random things, so that whatever is valid is the grammar's doing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pydantic
import pytest
from serve_live import Live, engine_for, serving, write_model
from test_grammar import BAD

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = [COMPLETIONS, CHAT]
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["ok", "n"],
}
CLOSED = {**SCHEMA, "additionalProperties": False}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    engine = engine_for(write_model(tmp_path_factory.mktemp("tiny")))
    with serving(engine) as live:
        yield live
    engine.shutdown()


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    """The server; afterwards it must be idle, its pool whole."""
    yield shared
    shared.wait_idle()


def asking(path: str, **more: Any) -> dict[str, Any]:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": HI}
    return {**prompt, "max_tokens": 200, "temperature": 1.0, "seed": 3, **more}


def answer(live: Live, path: str, **more: Any) -> tuple[str, str]:
    """(text, finish reason)."""
    reply = live.post(path, asking(path, **more))
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    return text, choice["finish_reason"]


def error(live: Live, path: str, **more: Any) -> dict[str, Any]:
    reply = live.post(path, asking(path, **more))
    assert reply.status_code == 400, reply.text[:300]
    return reply.json()["error"]


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    named = {"name": "thing", "schema": schema, **more}
    return {"type": "json_schema", "json_schema": named}


@pytest.mark.parametrize("path", PATHS)
def test_each_kind(live: Live, path: str) -> None:
    def said(**wish: Any) -> str:
        text, reason = answer(live, path, structured_outputs=wish)
        assert reason == "stop"
        return text

    assert said(choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch("[0-9]{4}-[a-f]{2}", said(regex="[0-9]{4}-[a-f]{2}"))
    assert json.loads(said(json=CLOSED))["ok"] in (True, False)
    assert json.loads(said(json=json.dumps(CLOSED)))["n"] < 1_000
    assert said(grammar='start: "a" "b"~3') == "abbb"
    assert said(grammar='root ::= "a" "b"') == "ab"


@pytest.mark.parametrize("path", PATHS)
def test_response_formats(live: Live, path: str) -> None:
    text, reason = answer(live, path, response_format=schema_format(CLOSED))
    assert reason == "stop" and set(json.loads(text)) == {"ok", "n"}
    strict = schema_format(SCHEMA, strict=True, description="…")
    text, reason = answer(live, path, response_format=strict)
    assert reason == "stop" and set(json.loads(text)) == {"ok", "n"}
    free = answer(live, path, response_format={"type": "text"})
    assert free == answer(live, path)
    text, reason = answer(live, path, response_format={"type": "json_object"})
    assert text.startswith("{") and (reason == "length" or json.loads(text) != [])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": 5}},
        schema_format(SCHEMA, strict="yes"),
        {"type": "yaml"},
        {},
        "json_object",
        schema_format({"type": "strin"}),
    ],
)
def test_bad_response_formats(live: Live, path: str, value: Any) -> None:
    fault = error(live, path, response_format=value)
    assert fault["param"] == "response_format"
    assert "response_format" in fault["message"]


@pytest.mark.parametrize(("kinds", "words"), BAD, ids=range(len(BAD)))
def test_c64_bad_grammars_are_a_400_that_names_the_fault(
    live: Live, kinds: dict[str, Any], words: str
) -> None:
    for stream in (False, True):
        fault = error(live, CHAT, structured_outputs=kinds, stream=stream)
        assert words in fault["message"]
        assert fault["param"] == "structured_outputs"


def test_c65_no_depth_breaks_the_server(live: Live) -> None:
    for depth in (900, 2_000, 50_000):
        deep = '{"anyOf":[' * depth + "{}" + "]}" * depth
        body = f'{{"messages": [], "structured_outputs": {{"json": {deep}}}}}'
        reply = live.post(CHAT, body)
        assert reply.status_code == 400, reply.text[:300]


def test_more_than_one_wish(live: Live) -> None:
    both = {"regex": "a", "choice": ["b"]}
    assert "exactly one" in error(live, CHAT, structured_outputs=both)["message"]
    fault = error(
        live,
        CHAT,
        structured_outputs={"regex": "a"},
        response_format={"type": "json_object"},
    )
    assert "both" in fault["message"]
    fault = error(live, CHAT, structured_outputs={"regexp": "a"})
    assert "regexp" in fault["message"]


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_older_names_say_what_to_use(live: Live, kind: str) -> None:
    fault = error(live, CHAT, **{f"guided_{kind}": "a"})
    assert fault["param"] == f"guided_{kind}"
    assert "structured_outputs" in fault["message"] and kind in fault["message"]


# Faults that users of other servers reported.
def test_c19_characters_of_several_tokens_stream_whole(live: Live) -> None:
    wish = {"choice": ["🦙🔥 dáď 你好"]}
    chunks = live.chunks(CHAT, asking(CHAT, structured_outputs=wish))
    deltas = [c["choices"][0]["delta"].get("content") or "" for c in chunks]
    assert "".join(deltas) == "🦙🔥 dáď 你好"
    assert not any("\ufffd" in delta for delta in deltas)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_c26_logprobs_are_json(live: Live) -> None:
    body = asking(COMPLETIONS, structured_outputs={"choice": ["yes"]}, logprobs=5)
    reply = live.post(COMPLETIONS, {**body, "top_k": 1})
    answer = json.loads(reply.text, parse_constant=lambda name: pytest.fail(name))
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 3


def test_c65_a_tree_ends(live: Live) -> None:
    tree = {
        "$defs": {
            "T": {
                "type": "object",
                "properties": {
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/T"}}
                },
                "required": ["kids"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/T",
    }
    ended = 0
    for seed in range(6):
        text, reason = answer(live, CHAT, structured_outputs={"json": tree}, seed=seed)
        ended += reason == "stop"
        assert reason == "length" or "kids" in json.loads(text)
    assert ended


@pytest.mark.parametrize("schema", [{}, {"type": "number"}, {"type": "string"}])
def test_c66_open_schemas_end_or_run_to_the_limit(live: Live, schema: Any) -> None:
    for seed in range(4):
        wish = {"json": schema}
        text, reason = answer(
            live, COMPLETIONS, structured_outputs=wish, seed=seed, max_tokens=50
        )
        assert reason in ("stop", "length")
        assert reason == "length" or json.loads(text) is not ...


def test_c68_no_end_inside_an_object(live: Live) -> None:
    """The end-of-text token is what the model wants most, from the first token on."""
    text, reason = answer(
        live, CHAT, response_format=schema_format(CLOSED), logit_bias={"256": 100}
    )
    assert reason == "stop" and set(json.loads(text)) == {"ok", "n"}


def test_stop_strings_and_lengths(live: Live) -> None:
    wish = {"choice": ["one two three"]}
    stopped = answer(live, CHAT, structured_outputs=wish, stop=["two"])
    assert stopped == ("one ", "stop")
    cut = answer(live, CHAT, structured_outputs=wish, max_tokens=4)
    assert cut == ("one ", "length")
    whole = answer(live, CHAT, structured_outputs=wish, max_tokens=13)
    assert whole == ("one two three", "stop")
    more = answer(live, CHAT, structured_outputs=wish, min_tokens=50, ignore_eos=True)
    assert more == ("one two three", "stop")


def test_a_request_that_can_say_nothing_fails_alone(live: Live) -> None:
    stuck = asking(CHAT, structured_outputs={"choice": ["yes"]}, allowed_token_ids=[5])
    reply = live.post(CHAT, stuck)
    assert reply.status_code == 500
    assert answer(live, CHAT, structured_outputs={"choice": ["yes"]})[0] == "yes"


def test_siblings_each_follow_their_own(live: Live) -> None:
    body = asking(CHAT, structured_outputs={"regex": "[a-z]{3,9}"}, n=4)
    choices = live.post(CHAT, body).json()["choices"]
    texts = [c["message"]["content"] for c in choices]
    assert all(re.fullmatch("[a-z]{3,9}", text) for text in texts)
    assert len(set(texts)) > 1


def test_many_at_once_in_a_small_pool(live: Live) -> None:
    """Preempted, mixed and left alone: each keeps to its own grammar, and a seed
    gives what it gives alone."""
    wishes = [{"regex": f"[a-m]{{40}}{i}"} for i in range(24)]
    with ThreadPoolExecutor(24) as threads:
        ask = lambda wish: answer(live, CHAT, structured_outputs=wish)  # noqa: E731
        together = list(threads.map(ask, wishes))
    for i, (text, reason) in enumerate(together):
        assert reason == "stop" and re.fullmatch(f"[a-m]{{40}}{i}", text)
    assert answer(live, CHAT, structured_outputs=wishes[7]) == together[7]


def test_the_official_client_parses_a_class(live: Live) -> None:
    class Verdict(pydantic.BaseModel):
        ok: bool
        grade: int = pydantic.Field(ge=1, le=5)

    with openai.OpenAI(base_url=live.url + "/v1", api_key="x") as client:
        done = client.chat.completions.parse(
            model="tiny", messages=HI, response_format=Verdict, max_tokens=100
        )
    assert done.choices[0].finish_reason == "stop"
    assert isinstance(done.choices[0].message.parsed, Verdict)
