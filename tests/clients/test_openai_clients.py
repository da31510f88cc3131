"""The libraries that speak OpenAI's protocol, as their manuals say to use them."""

from __future__ import annotations

import asyncio

import litellm
import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from .conftest import Demo

QUESTION = "What is the capital of France?"
ASKED = [{"role": "user", "content": QUESTION}]
LIMITS = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def client(demo: Demo) -> openai.OpenAI:
    return openai.OpenAI(base_url=demo.v1, api_key=demo.key, max_retries=0)


# OpenAI's own.
def test_openai_lists_models(demo: Demo, client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == [demo.model]
    assert client.models.retrieve(demo.model).id == demo.model


def test_openai_chat(demo: Demo, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=demo.model, messages=ASKED, **LIMITS)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None and answer.usage.completion_tokens <= 12


def test_openai_chat_streamed(demo: Demo, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=demo.model,
        messages=ASKED,
        stream=True,
        stream_options={"include_usage": True},
        **LIMITS,
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens <= 12


def test_openai_completions_whole_and_streamed(
    demo: Demo, client: openai.OpenAI
) -> None:
    prompt = "The capital of France is"
    whole = client.completions.create(model=demo.model, prompt=prompt, **LIMITS)
    stream = client.completions.create(
        model=demo.model, prompt=prompt, stream=True, **LIMITS
    )
    assert "".join(c.choices[0].text for c in stream) == whole.choices[0].text != ""


def test_openai_errors_have_their_types(demo: Demo, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=ASKED)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=demo.model, messages=ASKED, temperature=-1)
    stranger = openai.OpenAI(base_url=demo.v1, api_key="guess", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_openai_async_at_once(demo: Demo) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=demo.v1, api_key=demo.key) as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=demo.model, messages=ASKED, **LIMITS
                    )
                    for _ in range(8)
                )
            )
        return [answer.choices[0].message.content for answer in answers]

    texts = asyncio.run(ask())
    assert len(set(texts)) == 1 and "Paris" in (texts[0] or "")


# LangChain.
@pytest.fixture(scope="module")
def chain(demo: Demo) -> ChatOpenAI:
    return ChatOpenAI(
        model=demo.model,
        base_url=demo.v1,
        api_key=demo.key,
        temperature=0,
        max_tokens=12,
        max_retries=0,
    )


def test_langchain_invoke(chain: ChatOpenAI) -> None:
    answer = chain.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert answer.text and answer.usage_metadata["output_tokens"] <= 12
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def test_langchain_stream_and_batch(chain: ChatOpenAI) -> None:
    whole = AIMessageChunk("")
    for chunk in chain.stream(QUESTION):
        whole += chunk
    assert "Paris" in whole.text
    batch = chain.batch([QUESTION, QUESTION])
    assert [answer.text for answer in batch] == [whole.text] * 2


def test_langchain_async(chain: ChatOpenAI) -> None:
    assert "Paris" in asyncio.run(chain.ainvoke(QUESTION)).text


# LlamaIndex.
@pytest.fixture(scope="module")
def index_model(demo: Demo) -> OpenAILike:
    return OpenAILike(
        model=demo.model,
        api_base=demo.v1,
        api_key=demo.key,
        is_chat_model=True,
        context_window=2048,
        temperature=0,
        max_tokens=12,
        max_retries=0,
    )


def test_llama_index_chat_and_stream(index_model: OpenAILike) -> None:
    asked = [ChatMessage(role="user", content=QUESTION)]
    assert "Paris" in (index_model.chat(asked).message.content or "")
    parts = [part.delta or "" for part in index_model.stream_chat(asked)]
    assert "Paris" in "".join(parts) and len(parts) > 1


def test_llama_index_complete(index_model: OpenAILike) -> None:
    assert "Paris" in index_model.complete(QUESTION).text


# LiteLLM.
def test_litellm_whole_and_streamed(demo: Demo) -> None:
    common = {
        "model": f"hosted_vllm/{demo.model}",
        "messages": ASKED,
        "api_base": demo.v1,
        "api_key": demo.key,
        **LIMITS,
    }
    whole = litellm.completion(**common).choices[0].message.content
    parts = litellm.completion(**common, stream=True)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    assert "Paris" in whole and streamed == whole


def test_litellm_async_through_the_openai_name(demo: Demo) -> None:
    answer = asyncio.run(
        litellm.acompletion(
            model=f"openai/{demo.model}",
            messages=ASKED,
            api_base=demo.v1,
            api_key=demo.key,
            **LIMITS,
        )
    )
    assert "Paris" in answer.choices[0].message.content
