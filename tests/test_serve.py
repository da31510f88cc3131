"""The server through the real `openai` client, and its own endpoints, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from serve_live import BLOCK, LENGTH, Live, engine_for, serving, write_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


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


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0) as c:
        yield c


def one_text(live: Live, **body: object) -> str:
    return live.complete(**body)["choices"][0]["text"]


# The openai client.
def test_client_lists_models(client: openai.OpenAI) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == ["tiny", "alias"]
    assert cards[0].max_model_len == LENGTH
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_client_completion_and_stream_agree(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.object == "text_completion" and whole.model == "tiny"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens == 3 and whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == 15
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (
        len(chunks) - 1
    )
    assert chunks[-1].choices[0].finish_reason == "length"


def test_client_chat_and_stream_agree(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": HI, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**asked, max_completion_tokens=12)
    assert whole.choices[0].message.role == "assistant"
    options = {"stream_options": {"include_usage": True}, "stream": True}
    chunks = list(client.chat.completions.create(**asked, **options, max_tokens=12))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"


def test_client_async_many_at_once(live: Live) -> None:
    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        asked = {"model": "tiny", "prompt": f"number {i}", "max_tokens": 20}
        if i % 2:
            reply = await client.completions.create(**asked, temperature=0)
            return reply.choices[0].text
        stream = await client.completions.create(**asked, temperature=0, stream=True)
        return "".join([c.choices[0].text async for c in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="x") as c:
            return await asyncio.gather(*(ask(c, i) for i in range(24)))

    texts = asyncio.run(run())
    for i in range(0, 24, 5):
        assert texts[i] == one_text(live, prompt=f"number {i}", max_tokens=20)


def test_client_errors_have_their_class_and_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as lost:
        client.completions.create(model="other", prompt="x")
    assert lost.value.body["param"] == "model" and lost.value.body["code"] == 404
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=HI, temperature=3)
    assert wrong.value.body["param"] == "temperature"
    assert wrong.value.body["type"] == "BadRequestError"


# Prompts, choices, order.
def test_every_form_of_prompt(live: Live) -> None:
    ids = live.post("/tokenize", {"prompt": "abc"}).json()["tokens"]
    text = one_text(live, prompt="abc", max_tokens=5)
    for prompt in ("abc", ["abc"], ids, [ids]):
        assert one_text(live, prompt=prompt, max_tokens=5) == text


def test_batch_of_prompts_keeps_its_order(live: Live) -> None:
    prompts = [f"p{i}" * (1 + i % 3) for i in range(9)]
    asked = {"prompt": prompts, "max_tokens": 6}
    answer = live.complete(**asked)
    assert [c["index"] for c in answer["choices"]] == list(range(9))
    alone = [one_text(live, prompt=p, max_tokens=6) for p in prompts]
    assert [c["text"] for c in answer["choices"]] == alone
    assert answer["usage"]["prompt_tokens"] == sum(len(p) for p in prompts)
    assert answer["usage"]["completion_tokens"] == 54
    streamed = [""] * 9
    for chunk in live.chunks(COMPLETIONS, asked):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == alone


def test_n_choices_are_numbered_prompt_by_prompt(live: Live) -> None:
    body = {"prompt": ["ab", "cd"], "n": 3, "temperature": 1, "seed": 5}
    answer = live.complete(**body, max_tokens=8)
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    texts = [c["text"] for c in answer["choices"]]
    assert len(set(texts)) > 2
    streamed = [""] * 6
    chunks = live.chunks(COMPLETIONS, {**body, "max_tokens": 8})
    ends = [c["index"] for k in chunks for c in k["choices"] if c["finish_reason"]]
    assert sorted(ends) == list(range(6))
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_seed_decides_and_default_is_random(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 12, "temperature": 1.5}
    assert one_text(live, **body, seed=3) == one_text(live, **body, seed=3)
    assert len({one_text(live, **body) for _ in range(4)}) > 1


def test_sampling_fields_reach_the_engine(live: Live) -> None:
    bias = {"logit_bias": {"65": 100}}  # token 65 is one printable byte
    letter = live.post("/detokenize", {"tokens": [65]}).json()["prompt"]
    assert one_text(live, prompt="x", max_tokens=4, **bias) == letter * 4
    only = live.complete(
        prompt="x", max_tokens=6, temperature=1, allowed_token_ids=[65, 66]
    )
    other = live.post("/detokenize", {"tokens": [66]}).json()["prompt"]
    assert set(only["choices"][0]["text"]) <= {letter, other}
    ended = live.complete(prompt="x", max_tokens=9, **bias, stop_token_ids=[65])
    choice = ended["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 65)
    assert choice["text"] == "" and ended["usage"]["completion_tokens"] == 1
    eos = {"logit_bias": {"256": 100}, "max_tokens": 5}
    stopped = live.complete(prompt="x", **eos)["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", None)
    assert (
        live.complete(prompt="x", **eos, ignore_eos=True)["usage"]["completion_tokens"]
        == 5
    )


def test_ids_on_request(live: Live) -> None:
    body = {"prompt": "abcd", "max_tokens": 4, "return_token_ids": True}
    choice = live.complete(**body)["choices"][0]
    assert len(choice["prompt_token_ids"]) == 4 and len(choice["token_ids"]) == 4
    chunks = live.chunks(COMPLETIONS, body)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert not any("prompt_token_ids" in c["choices"][0] for c in chunks[1:])
    ids = [i for c in chunks for i in c["choices"][0]["token_ids"]]
    assert ids == choice["token_ids"]
    chat = live.chat(messages=HI, max_tokens=3, return_token_ids=True)
    assert len(chat["choices"][0]["token_ids"]) == 3
    first = live.chunks(
        CHAT, {"messages": HI, "max_tokens": 3, "return_token_ids": True}
    )[0]
    assert first["prompt_token_ids"] == chat["prompt_token_ids"]
    named = live.complete(
        prompt="ab", max_tokens=2, logprobs=0, return_tokens_as_token_ids=True
    )
    shown = named["choices"][0]["logprobs"]["tokens"]
    assert all(t.startswith("token_id:") for t in shown)


def test_truncated_prompt_is_counted_and_echoed_as_it_ran(live: Live) -> None:
    answer = live.complete(
        prompt="abcdefgh", truncate_prompt_tokens=3, echo=True, max_tokens=1
    )
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["text"].startswith("fgh")
    assert (
        one_text(live, prompt="fgh", max_tokens=1) == answer["choices"][0]["text"][3:]
    )


# Chats.
def test_chat_prompt_is_the_rendered_template(live: Live) -> None:
    rendered = "<|system|>be brief<|end|><|user|>Hi<|end|><|assistant|>"
    messages = [{"role": "system", "content": "be brief"}, *HI]
    answer = live.chat(messages=messages, max_tokens=6, return_prompt_text=True)
    assert answer["prompt_text"] == rendered
    assert answer["choices"][0]["message"]["content"] == one_text(
        live, prompt=rendered, max_tokens=6
    )
    parts = [{"type": "text", "text": "be brief"}]
    messages[0] = {"role": "system", "content": parts}
    assert live.chat(messages=messages, max_tokens=6)["choices"] == answer["choices"]


def test_chat_without_max_tokens_fills_the_context(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 480}], "ignore_eos": True}
    usage = live.chat(**body)["usage"]
    assert usage["total_tokens"] == LENGTH


def test_chat_echo_prepends_the_continued_message(live: Live) -> None:
    messages = [*HI, {"role": "assistant", "content": "So "}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 4}
    plain = live.chat(**body)["choices"][0]["message"]["content"]
    echoed = live.chat(**body, echo=True)["choices"][0]["message"]["content"]
    assert echoed == "So " + plain
    chunks = live.chunks(CHAT, {**body, "echo": True})
    parts = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    assert "".join(parts) == echoed


def test_chat_n_streams_each_role_once(live: Live) -> None:
    body = {"messages": HI, "n": 3, "temperature": 1, "seed": 2, "max_tokens": 6}
    whole = live.chat(**body)
    texts, roles = [""] * 3, [0] * 3
    for chunk in live.chunks(CHAT, body):
        for choice in chunk["choices"]:
            roles[choice["index"]] += "role" in choice["delta"]
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert roles == [1, 1, 1]
    assert texts == [c["message"]["content"] for c in whole["choices"]]


# Usage.
def test_stream_usage_null_then_final_or_continuous(live: Live) -> None:
    body = {"prompt": "abc", "max_tokens": 5}
    options = {"include_usage": True}
    chunks = live.chunks(COMPLETIONS, {**body, "stream_options": options})
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 8
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = live.chunks(COMPLETIONS, {**body, "stream_options": options})
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 5
    assert all(c["usage"]["prompt_tokens"] == 3 for c in chunks)
    assert "usage" not in live.chunks(COMPLETIONS, body)[0]


# Small endpoints.
def test_tokenize_and_back(live: Live) -> None:
    text = "héllo 🦙 <|user|>"
    answer = live.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == LENGTH and answer["tokens"][-1] == 257
    back = live.post("/detokenize", {"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}
    assert live.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert live.post("/detokenize", {"tokens": [10**9]}).status_code == 400
    assert live.post("/detokenize", {"tokens": [-1]}).status_code == 400
    assert live.post("/tokenize", {}).status_code == 400
    assert live.post("/tokenize", {"prompt": "x", "messages": HI}).status_code == 400


def test_tokenized_messages_are_what_a_chat_serves(live: Live) -> None:
    asked = {"messages": HI, "return_token_ids": True, "max_tokens": 1}
    ids = live.chat(**asked)["prompt_token_ids"]
    assert live.post("/tokenize", {"messages": HI}).json()["tokens"] == ids


def test_operation_endpoints(live: Live) -> None:
    for path in ("/health", "/ping"):
        reply = live.http.get(path)
        assert (reply.status_code, reply.content) == (200, b"")
    assert live.post("/ping", "").status_code == 200
    assert set(live.http.get("/version").json()) == {"version"}
    assert live.http.get("/load").json() == {"server_load": 0}
    reply = live.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert "vllm:generation_tokens_total" in reply.text


def test_openapi_documents_the_bodies(live: Live) -> None:
    paths = live.http.get("/openapi.json").json()["paths"]
    body = paths[COMPLETIONS]["post"]["requestBody"]["content"]["application/json"]
    assert "temperature" in body["schema"]["properties"]


def test_metrics_count_what_was_served(live: Live) -> None:
    def value(name: str) -> float:
        text = live.http.get("/metrics").text
        lines = [x for x in text.splitlines() if x.startswith(f"vllm:{name}{{")]
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines)

    before = {n: value(n) for n in ("prompt_tokens_total", "generation_tokens_total")}
    ended = value("request_success_total")
    live.complete(prompt="metrics!", max_tokens=7)
    live.wait_idle()
    assert value("prompt_tokens_total") - before["prompt_tokens_total"] == 8
    assert value("generation_tokens_total") - before["generation_tokens_total"] == 7
    assert value("request_success_total") - ended == 1
    assert value("kv_cache_usage_perc") == 0


def test_cache_salt_separates(live: Live) -> None:
    body = {"prompt": "salted " * 8, "max_tokens": 1}

    def cached(**more: object) -> int:
        usage = live.complete(**body, **more)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    hit = (len(body["prompt"]) - 1) // BLOCK * BLOCK
    assert [cached(cache_salt=s) for s in ("a", "a", "b")] == [0, hit, 0]
    assert [cached(), cached()] == [0, hit]
    assert live.post(COMPLETIONS, {**body, "cache_salt": ""}).status_code == 400
    assert live.post(COMPLETIONS, {**body, "cache_salt": 5}).status_code == 400


def test_stream_survives_line_separators_in_text(live: Live) -> None:
    """U+2028 must travel escaped: some clients split lines there."""
    text = "a\u2028b\x85c"
    body = {"prompt": text, "echo": True, "max_tokens": 1, "stream": True}
    raw = live.post(COMPLETIONS, body).content
    assert raw.isascii() and len(raw.decode().splitlines()) == raw.count(b"\n")
    assert text in json.loads(raw.decode().split("\n\n")[0][6:])["choices"][0]["text"]
