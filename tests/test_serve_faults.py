"""What users of other servers reported, each as its right behaviour here.

The letters and numbers name the rows of a list of such reports; where a row concerns
the engine's own rooms it is tested there too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serve_live import LENGTH, Live, engine_for, serving, write_model

from pagedattn.serve.settings import ServeArgs

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    engine = engine_for(write_model(tmp_path_factory.mktemp("tiny")))
    with serving(engine, ServeArgs(trust_request_chat_template=True)) as live:
        yield live
    engine.shutdown()


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    """The server; afterwards it must be idle, its pool whole."""
    yield shared
    shared.wait_idle()


def refused(live: Live, path: str, body: Any, param: str | None = None) -> str:
    """The message of a 400 in OpenAI's shape, which is strict JSON."""
    reply = live.post(path, body)
    assert reply.status_code == 400, (body, reply.text[:300])
    answer = json.loads(reply.text, parse_constant=lambda name: pytest.fail(name))
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    if param is not None:
        assert error["param"] == param, error
    return error["message"]


def forced(text: str) -> list[int]:
    """Token ids of `text` where every byte is a token, in GPT-2's byte order."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    spelled = {b: chr(b) for b in visible}
    spelled |= {b: chr(256 + i) for i, b in enumerate(hidden)}
    order = sorted(spelled.values())
    return [order.index(spelled[byte]) for byte in text.encode()]


# Stop strings.
def test_c01_no_part_of_a_stop_string_is_streamed(live: Live) -> None:
    body = {"prompt": "once upon", "max_tokens": 40}
    text = live.complete(**body)["choices"][0]["text"]
    start = next(i for i in range(5, 30) if text.index(text[i : i + 4]) == i)
    stop = text[start : start + 4]
    chunks = live.chunks(COMPLETIONS, {**body, "stop": [stop]})
    deltas = [c["choices"][0]["text"] for c in chunks]
    assert "".join(deltas) == text[:start]
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
    whole = live.complete(**body, stop=stop)["choices"][0]
    assert whole["text"] == text[:start] and whole["stop_reason"] == stop
    kept = live.complete(**body, stop=stop, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == text[: start + 4]


@pytest.mark.parametrize("stop", ["", [""], ["", "X"], [5], 5, {"a": 1}])
def test_c04_empty_and_odd_stops_are_refused(live: Live, stop: Any) -> None:
    refused(live, COMPLETIONS, {"prompt": "x", "stop": stop}, "stop")


@pytest.mark.parametrize("stop", [[], None])
def test_c04_no_stops_are_no_stops(live: Live, stop: Any) -> None:
    answer = live.complete(prompt="x", max_tokens=3, stop=stop, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3


# Prompts.
@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], None, {}, 5, [True], ["a", 1], [1, "a"], [1.5], [[[1]]]],
)
def test_c09_empty_and_odd_prompts_are_refused(live: Live, prompt: Any) -> None:
    assert "prompt" in refused(live, COMPLETIONS, {"prompt": prompt})
    assert live.complete(prompt="still here", max_tokens=1)


def test_c09_a_bad_prompt_in_a_batch_starts_nothing(live: Live) -> None:
    for stream in (True, False):
        body = {"prompt": ["good", "x" * LENGTH], "stream": stream}
        message = refused(live, COMPLETIONS, body, "prompt")
        assert str(LENGTH) in message
    refused(live, COMPLETIONS, {"prompt": [[1, 10**6]], "stream": True}, "prompt")
    refused(live, COMPLETIONS, {"prompt": [-1]}, "prompt")


def test_c11_scoring(live: Live) -> None:
    body = {"prompt": "Your answer: Yes", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = live.complete(**body)
    choice = answer["choices"][0]
    assert choice["text"] == body["prompt"] and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == body["prompt"]
    assert scores["text_offset"] == list(range(len(body["prompt"])))
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert all(lp <= 0 for lp in scores["token_logprobs"][1:])
    streamed = live.chunks(COMPLETIONS, body)
    assert [c["choices"][0]["logprobs"] for c in streamed] == [scores]
    assert streamed[0]["choices"][0]["text"] == body["prompt"]
    refused(live, COMPLETIONS, {**body, "echo": False}, "max_tokens")
    refused(live, CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens")


def test_c11_scores_are_what_generation_said(live: Live) -> None:
    made = live.complete(prompt="ab", max_tokens=6, logprobs=0, return_token_ids=True)
    made = made["choices"][0]
    ids = [*made["prompt_token_ids"], *made["token_ids"]]
    scored = live.complete(prompt=ids, max_tokens=0, echo=True, logprobs=0)
    values = scored["choices"][0]["logprobs"]["token_logprobs"][2:]
    assert values == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-3)


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_c15_echo_of_token_ids(live: Live, logprobs: int | None, stream: bool) -> None:
    body = {"prompt": [*forced("héy"), 256], "echo": True, "logprobs": logprobs}
    body |= {"max_tokens": 4, "skip_special_tokens": False}
    alone = live.complete(**{**body, "echo": False})["choices"][0]["text"]
    expected = "héy<|end|>" + alone
    if stream:
        choices = [c["choices"][0] for c in live.chunks(COMPLETIONS, body)]
    else:
        choices = live.complete(**body)["choices"]
    assert "".join(c["text"] for c in choices) == expected
    assert choices[0]["text"].startswith("héy<|end|>")
    if logprobs:
        tokens = [t for c in choices if c["logprobs"] for t in c["logprobs"]["tokens"]]
        offsets = [
            o for c in choices if c["logprobs"] for o in c["logprobs"]["text_offset"]
        ]
        assert len(tokens) == 9 and offsets == sorted(offsets)


def test_c17_special_tokens_are_added_where_asked(live: Live) -> None:
    """This tokenizer adds none, so both ways agree, and as /tokenize says."""
    for special in (True, False):
        asked = {"prompt": "ab", "add_special_tokens": special}
        ids = live.post("/tokenize", asked).json()["tokens"]
        answer = live.complete(**asked, max_tokens=1, return_token_ids=True)
        assert answer["choices"][0]["prompt_token_ids"] == ids


# Fields whose capability is not built.
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "}"),
        ("best_of", 2),
        ("best_of", 100_000),
        ("use_beam_search", True),
        ("prompt_embeds", "abcd"),
        ("tools", []),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("response_format", {"type": "structural_tag"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("structured_outputs", {"structural_tag": "a"}),
        ("guided_regex", "a"),
        ("logits_processors", ["x"]),
        ("reasoning_effort", "low"),
        ("thinking_token_budget", 5),
        ("thinking", {"type": "enabled", "budget_tokens": 5}),
        ("include_reasoning", False),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("store", True),
        ("service_tier", "flex"),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("logprob_token_ids", [1]),
        ("length_penalty", 2.0),
        ("truncation_side", "right"),
        ("n", True),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_c18_nothing_known_is_ignored(
    live: Live, path: str, name: str, value: Any
) -> None:
    if path == CHAT and name in ("reasoning_effort", "include_reasoning"):
        return  # chats know them
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": HI}
    assert name in refused(live, path, {**body, name: value}, name)


def test_harmless_fields_are_accepted(live: Live) -> None:
    body = {"user": "me", "metadata": {"a": "b"}, "store": False, "suffix": ""}
    body |= {"service_tier": "auto", "parallel_tool_calls": True, "best_of": 1}
    body |= {"response_format": {"type": "text"}, "tool_choice": "none"}
    body |= {"tools": None, "use_beam_search": False, "never_heard_of": [1]}
    assert live.complete(prompt="x", max_tokens=1, **body)
    assert live.chat(messages=HI, max_tokens=1, **body)


def test_fields_of_the_other_endpoint_are_refused(live: Live) -> None:
    refused(live, COMPLETIONS, {"messages": HI}, "messages")
    body = {"prompt": "x", "max_completion_tokens": 4}
    refused(live, COMPLETIONS, body, "max_completion_tokens")
    refused(live, CHAT, {"prompt": "x", "messages": HI}, "prompt")
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    message = {"role": "user", "content": [image]}
    assert "image_url" in refused(live, CHAT, {"messages": [message]})


# Log-probabilities.
def test_c24_chat_logprobs(live: Live) -> None:
    def content(**more: Any) -> list[dict]:
        answer = live.chat(messages=HI, max_tokens=3, logprobs=True, **more)
        return answer["choices"][0]["logprobs"]["content"]

    plain = content()
    assert all(set(e) == {"token", "logprob", "bytes", "top_logprobs"} for e in plain)
    assert all(e["top_logprobs"] == [] for e in plain)
    assert content(top_logprobs=0) == plain
    for top in (5, 20):
        entries = content(top_logprobs=top)
        assert [e["logprob"] for e in entries] == [e["logprob"] for e in plain]
        for entry in entries:
            values = [t["logprob"] for t in entry["top_logprobs"]]
            assert len(values) == top and values == sorted(values, reverse=True)
    for top in (21, -1, 10**6):
        refused(live, CHAT, {"messages": HI, "logprobs": True, "top_logprobs": top})
    refused(
        live,
        CHAT,
        {"messages": HI, "top_logprobs": 2, "logprobs": False},
        "top_logprobs",
    )
    refused(live, CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs")
    assert live.chat(messages=HI, max_tokens=1)["choices"][0]["logprobs"] is None


def test_c24_bytes_are_the_tokens_own(live: Live) -> None:
    """Every byte of an emoji is a token here; none of them is U+FFFD's bytes."""
    lead = forced("🦙")[0]
    body = {"messages": HI, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
    answer = live.chat(**body, logit_bias={str(lead): 100})
    entry = answer["choices"][0]["logprobs"]["content"][0]
    assert entry["bytes"] == ["🦙".encode()[0]]
    streamed = live.chunks(CHAT, {**body, "logit_bias": {str(lead): 100}})
    found = [c["choices"][0]["logprobs"] for c in streamed if c["choices"]]
    assert [f["content"][0] for f in found if f] == [entry]


def test_c26_far_below_is_finite_json(live: Live) -> None:
    bias = {str(i): -100 for i in range(260) if i != 65}
    for more in ({"top_k": 1}, {"logit_bias": bias}, {"allowed_token_ids": [65]}):
        body = {"prompt": "x", "max_tokens": 2, "logprobs": 5, **more}
        reply = live.post(COMPLETIONS, {**body, "echo": True, "temperature": 1})
        assert reply.status_code == 200
        json.loads(reply.text, parse_constant=lambda name: pytest.fail(name))


def test_c27_the_chosen_value_does_not_depend_on_top(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 4, "temperature": 1, "seed": 4}
    one, five = (
        live.complete(**body, logprobs=n)["choices"][0]["logprobs"] for n in (0, 5)
    )
    assert one["token_logprobs"] == five["token_logprobs"]
    assert all(len(top) >= 5 for top in five["top_logprobs"])
    for token, value, top in zip(
        five["tokens"], five["token_logprobs"], five["top_logprobs"], strict=True
    ):
        assert top[token] == value


# Values.
ODD_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", '"0.5"', "true", "[]", "{}"]


@pytest.mark.parametrize("value", ODD_NUMBERS)
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"]
)
def test_c36_odd_numbers(live: Live, name: str, value: str) -> None:
    refused(live, COMPLETIONS, f'{{"prompt": "x", "{name}": {value}}}')
    refused(live, COMPLETIONS, f'{{"prompt": "x", "logit_bias": {{"5": {value}}}}}')


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0),
        ("top_p", 1.5),
        ("temperature", -1),
        ("temperature", 2.5),
        ("n", 0),
        ("n", -1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", -5),
        ("max_tokens", 10**30),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("repetition_penalty", 0),
        ("seed", 2**64),
        ("seed", "7"),
        ("logprobs", 21),
        ("logprobs", -2),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [999_999]),
        ("stop_token_ids", ["a"]),
        ("bad_words", [""]),
        ("stream", "yes"),
        ("stream", 1),
        ("echo", 1),
        ("priority", 1),
        ("priority", "high"),
        ("model", 5),
        ("truncate_prompt_tokens", 0),
        ("request_id", "x" * 300),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_c36_out_of_range(live: Live, name: str, value: Any) -> None:
    assert name in refused(live, COMPLETIONS, {"prompt": "x", name: value}, name)


@pytest.mark.parametrize("name", ["temperature", "top_k", "seed", "min_tokens"])
def test_c36_astronomic_integers(live: Live, name: str) -> None:
    refused(live, COMPLETIONS, {"prompt": "x", name: 10**400}, name)


def test_fields_named_like_our_own_attributes_change_nothing(live: Live) -> None:
    odd = ("check", "scoring", "include_usage", "model_extra", "model_config")
    odd += ("elsewhere", "generation_prompt", "__class__", "model_fields_set")
    for body in ({"prompt": "x"}, {"messages": HI}):
        path = COMPLETIONS if "prompt" in body else CHAT
        body |= {"max_tokens": 2, "ignore_eos": True} | {name: True for name in odd}
        reply = live.post(path, body)
        assert reply.status_code == 200
        assert reply.json()["usage"]["completion_tokens"] == 2


def test_c36_off_values_are_fine(live: Live) -> None:
    for top_k in (0, -1):
        live.complete(prompt="x", max_tokens=1, temperature=1, top_k=top_k)
    live.complete(prompt="x", max_tokens=1, seed=-1, n=None, temperature=None)


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "{",
        "[]",
        '"x"',
        "nul",
        b"\xff\xfe{}",
        '{"prompt": "\\ud800"}',
        '{"prompt": "x", "seed": ' + "9" * 5000 + "}",
        "[" * 100_000,
        '{"prompt": ' + "[" * 100_000,
    ],
)
def test_broken_bodies(live: Live, raw: str | bytes) -> None:
    refused(live, COMPLETIONS, raw)


def test_error_bodies_do_not_quote_the_whole_request(live: Live) -> None:
    message = refused(live, COMPLETIONS, {"prompt": "x", "stop": ["a"] * 99 + [""]})
    assert len(message) < 3000
    long = live.post(COMPLETIONS, {"prompt": "x", "model": "m" * 100_000})
    assert long.status_code == 404 and len(long.content) < 1000


# Templates.
def test_c79_the_same_history_gives_the_same_ids_everywhere(live: Live) -> None:
    call = {"id": "1", "type": "function"}
    call["function"] = {"name": "f", "arguments": '{"a": 1}'}
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.a }}{% endfor %}"
        "{% endfor %}"
    )
    form = {"messages": history, "chat_template": template}
    ids = live.post("/tokenize", form).json()["tokens"]
    answer = live.chat(**form, n=2, temperature=1, max_tokens=1, return_token_ids=True)
    assert answer["prompt_token_ids"] == ids
    text = live.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text == "user:Hiassistant:1tool:2"
    # A template that knows no tools would lose the calls: that is refused, not done.
    for path in (CHAT, "/tokenize"):
        assert "tool_calls" in refused(live, path, {"messages": history}, "messages")


@pytest.mark.parametrize("text", ["OK!", "OK! ", "OK!\n"])
def test_c80_continue_final_message(live: Live, text: str) -> None:
    messages = [*HI, {"role": "assistant", "content": text}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 2}
    body |= {"add_generation_prompt": False, "return_prompt_text": True}
    assert live.chat(**body)["prompt_text"].endswith("<|assistant|>" + text)
    refused(live, CHAT, {**body, "add_generation_prompt": True})
    refused(live, CHAT, {**body, "messages": HI}, "continue_final_message")
    refused(live, "/tokenize", {**body, "add_generation_prompt": True})


def test_c81_what_templates_and_roles_do(live: Live) -> None:
    message = refused(live, CHAT, {"messages": [{"role": "foo", "content": "x"}]})
    assert "no foo here" in message
    developer = [{"role": "developer", "content": "be kind"}, *HI]
    answer = live.chat(messages=developer, max_tokens=1, return_prompt_text=True)
    assert answer["prompt_text"].startswith("<|system|>be kind")
    for messages in ([], None, "Hi", [5], [{}], [{"role": "user", "content": 5}]):
        refused(live, CHAT, {"messages": messages})
    refused(live, CHAT, {"messages": HI, "chat_template": "{% if"}, "chat_template")
    broken = {"messages": HI, "chat_template": "{{ messages[9].content.x }}"}
    refused(live, CHAT, broken)
    reserved = {"messages": HI, "chat_template_kwargs": {"messages": []}}
    refused(live, CHAT, reserved, "chat_template_kwargs")


# Usage and frames.
def test_c84_cached_tokens(live: Live) -> None:
    def cached(prompt: str, **more: Any) -> int:
        usage = live.complete(prompt=prompt, max_tokens=1, **more)["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        return usage["prompt_tokens_details"]["cached_tokens"]

    for length, hit in ((24, 16), (17, 16), (16, 0), (8, 0)):
        prompt = f"{length:02}" * (length // 2) + "x" * (length % 2)
        assert [cached(prompt), cached(prompt)] == [0, hit]
    body = {"prompt": "24" * 12, "max_tokens": 1}
    chunks = live.chunks(
        COMPLETIONS, {**body, "stream_options": {"include_usage": True}}
    )
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_c85_frames_of_a_chat(live: Live) -> None:
    chunks = live.chunks(CHAT, {"messages": HI, "max_tokens": 5})
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons[:-1] == [None] * (len(reasons) - 1) and reasons[-1] == "length"
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:])


# Ids.
def test_c89_repeated_client_ids(live: Live) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(i: int) -> tuple[str, str, str]:
        body = {"prompt": f"id {i}", "max_tokens": 30, "temperature": 0}
        headers = {"X-Request-Id": "same"}
        reply = live.post(COMPLETIONS, {**body, "request_id": "b"}, headers=headers)
        answer = reply.json()
        return answer["id"], reply.headers["x-request-id"], answer["choices"][0]["text"]

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(ask, range(4)))
    for i, (id, header, text) in enumerate(got):
        assert (id, header) == ("cmpl-same", "same")
        assert (
            text == live.complete(prompt=f"id {i}", max_tokens=30)["choices"][0]["text"]
        )
    assert live.complete(prompt="x", max_tokens=1, request_id="b")["id"] == "cmpl-b"
    other = live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    assert other.json()["id"] == "cmpl-" + other.headers["x-request-id"]


# Sizes.
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "n": 1_000_000, "temperature": 1},
        {"prompt": ["x"] * 10_000, "n": 128, "temperature": 1},
        {"prompt": ["x"] * 1_025},
        {"prompt": ["x"] * 100, "n": 100, "temperature": 1},
        {"prompt": "x", "logit_bias": {str(i): 1 for i in range(100_000)}},
        {"prompt": "x", "stop": ["a"] * 100_000},
        {"prompt": "x", "bad_words": ["a"] * 1_000_000},
        {"prompt": "x", "logprobs": 1_000_000},
        {"prompt": "x", "prompt_logprobs": 1_000_000},
    ],
    ids="n batch prompts both bias stop bad_words logprobs prompt_logprobs".split(),
)
def test_c104_huge_requests(live: Live, body: dict[str, Any]) -> None:
    refused(live, COMPLETIONS, body)
