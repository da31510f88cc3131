"""Tokenizers against transformers' and the library's own, and rules of one token."""

import functools
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from test_text import demo, demo_metadata, ids_of, tiny, tiny_metadata

from pagedattn.errors import NotSupported, UserError
from pagedattn.text.gguf import WORDS, build_tokenizer
from pagedattn.text.pieces import Spelling, byte_alphabet, spelling_of
from pagedattn.text.tokenizer import Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"]
PHRASES = [
    " the",
    "don't",
    "  ",
    "\n\n",
    "\t",
    "def f(x):\n    return x",
    "12",
    " 3.14",
]
TEXT = st.text(max_size=40) | st.lists(
    st.sampled_from(SPECIAL + PHRASES) | st.text(max_size=4), max_size=12
).map("".join)


@functools.cache
def transformers_demo(digits: bool) -> tokenizers.Tokenizer:
    """transformers' reading of the demo file.

    It takes no notice of tokenizer.ggml.pre, so lacks SmolLM2's digit splitting;
    with `digits` that is put back.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_TOKENIZER_MAPPING,
        convert_gguf_tokenizer,
    )

    if digits:
        library = tokenizers.Tokenizer.from_str(transformers_demo(False).to_str())
        split = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        both = [split, library.pre_tokenizer]
        library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(both)
        return library
    metadata = demo_metadata()
    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    found = {
        name: metadata[f"tokenizer.{key}"]
        for key, name in names.items()
        if f"tokenizer.{key}" in metadata
    }
    return convert_gguf_tokenizer("llama", found)[0]


# Text to ids.


@given(TEXT)
@example("x  12 ½ ²  7\n 8")
@example("🦙 dáď 你好 \r\n\r\n")
def test_gguf_agrees_with_transformers(text: str) -> None:
    want = transformers_demo(digits=True).encode(text, add_special_tokens=False).ids
    assert demo().encode(text, add_special_tokens=False) == want
    if not any(char.isnumeric() for char in text):
        plain = transformers_demo(digits=False)
        assert plain.encode(text, add_special_tokens=False).ids == want


def test_smollm_splits_digits_from_the_spaces_before_them() -> None:
    tokens = [demo().token(i) for i in demo().encode("x  12")]
    assert tokens == ["x", "ĠĠ", "1", "2"]


@functools.cache
def demo_bytes() -> frozenset[int]:
    """The bytes that the demo vocabulary has tokens for; it drops the others (some
    control characters)."""
    pieces = [demo().token_bytes(i) for i in range(demo().vocab_size)]
    return frozenset(piece[0] for piece in pieces if len(piece) == 1)


def demo_text(text: str) -> str:
    """`text` without the characters that the demo vocabulary can't write."""
    return "".join(char for char in text if demo_bytes().issuperset(char.encode()))


@given(TEXT.map(demo_text))
def test_decode_undoes_encode(text: str) -> None:
    ids = demo().encode(text)
    assert demo().decode(ids, skip_special_tokens=False) == text


@given(st.text("the cats,é🦙\n09Ωz", max_size=30))
def test_sentencepiece_round_trip(text: str) -> None:
    """Characters it has no token for become byte tokens; the prefix space goes."""
    for tokenizer in (tiny(True), tiny(False)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert 0 not in ids


def test_sentencepiece_merges_follow_scores() -> None:
    tokens = [tiny().token(i) for i in tiny().encode("the cat sat la", False)]
    assert tokens == ["▁the", "▁cat", "▁sat", "▁la"]


@pytest.mark.parametrize("best, want", [(4, ["ab", "c"]), (5, ["a", "bc"])])
def test_sentencepiece_joins_what_scores_highest(best: int, want: list[str]) -> None:
    tokens = ["<unk>", "a", "b", "c", "ab", "bc"]
    changes = {"tokens": tokens, "token_type": [2, 1, 1, 1, 1, 1]}
    changes |= {"scores": [float(i == best) for i in range(6)]}
    changes |= {"add_space_prefix": False, "add_bos_token": False}
    tokenizer = Tokenizer.from_gguf(tiny_metadata(**changes))
    assert [tokenizer.token(i) for i in tokenizer.encode("abc")] == want


def test_runs_of_spaces_stored_as_spaces_are_pieces() -> None:
    """Gemma's files spell them so; text of spaces must not fall to single ones."""
    keys = tiny_metadata()
    tokens = ["  " if t == "▁▁" else t for t in keys["tokenizer.ggml.tokens"]]
    types = [
        4 if token == "  " else kind
        for token, kind in zip(tokens, keys["tokenizer.ggml.token_type"], strict=True)
    ]
    changes = {"tokens": tokens, "token_type": types, "add_space_prefix": False}
    tokenizer = Tokenizer.from_gguf(tiny_metadata(**changes))
    ids = tokenizer.encode("  cat", False)
    assert tokenizer.token_bytes(ids[0]) == b"  " and tokenizer.decode(ids) == "  cat"


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_special_tokens_only_when_asked(bos: bool, eos: bool) -> None:
    keys = tiny_metadata(add_bos_token=bos, add_eos_token=eos)
    tokenizer = Tokenizer.from_gguf(keys)
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [1] * bos + plain + [2] * eos
    assert tokenizer.encode("") == [1] * bos + [2] * eos
    # C17: text that begins with BOS gets one more, unless asked not to.
    assert tokenizer.encode("<s>the").count(1) == 1 + bos
    assert tokenizer.encode("<s>the", False).count(1) == 1


def test_bos_default_of_each_kind() -> None:
    assert tiny().encode("")[:1] == [1]
    assert demo().encode("") == []


@pytest.mark.parametrize("name", sorted(WORDS))
def test_every_pre_tokenizer_keeps_text(name: str) -> None:
    """Each pattern compiles and loses nothing; digits are cut as it says."""
    keys = {"model": "gpt2", "pre": name, "tokens": list(byte_alphabet().values())}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    tokenizer = Tokenizer.from_gguf(metadata)
    text = "I'll DON'T \u00e9t\u00e9  \n\n  x==y/ 12345 ½ 你好🦙\r\n HelloWorld"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    pre = build_tokenizer(metadata).pre_tokenizer
    words = [word for word, _ in pre.pre_tokenize_str("a 12345")]
    digits = max(len(word.strip("Ġ")) for word in words[1:])
    single = WORDS[name].digits or name in ("qwen2", "deepseek-r1-qwen", "tekken")
    assert digits == (1 if single else 5 if WORDS[name].pattern is None else 3)


def test_unknown_kinds_are_named() -> None:
    with pytest.raises(NotSupported, match="'bloom'.*smollm"):
        Tokenizer.from_gguf(demo_metadata() | {"tokenizer.ggml.pre": "bloom"})
    with pytest.raises(NotSupported, match="'t5'.*gpt2"):
        Tokenizer.from_gguf(tiny_metadata(model="t5"))
    with pytest.raises(UserError, match="no tokenizer.ggml.tokens"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": "gpt2"})
    with pytest.raises(UserError, match="scores or merges"):
        Tokenizer.from_gguf(tiny_metadata(scores=None))


def test_lone_surrogate_is_the_callers_mistake() -> None:
    with pytest.raises(UserError, match="surrogate at index 1"):
        demo().encode("a\ud800")


def test_phi3_control_tokens_swallow_the_space_after_them() -> None:
    changes = {"add_space_prefix": False}
    phi3 = Tokenizer.from_gguf(
        tiny_metadata(**changes) | {"general.architecture": "phi3"}
    )
    assert phi3.encode("</s>\n the", False) == phi3.encode("</s>the", False)
    assert phi3.encode("<s>\nthe", False) != phi3.encode("<s>the", False)
    other = Tokenizer.from_gguf(tiny_metadata(**changes))
    assert other.encode("</s>\nthe", False) != other.encode("</s>the", False)


# Ids to text.

SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
BYTES, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
META = {"type": "Metaspace", "replacement": "▁"}


@pytest.mark.parametrize(
    "steps, want",
    [
        ([{"type": "ByteLevel"}], Spelling(byte_level=True)),
        ([SPACE, BYTES, FUSE, STRIP], Spelling(False, True, True)),
        ([SPACE, BYTES, FUSE], Spelling(False, True, False)),
        ([SPACE, FUSE], Spelling(False, False, False)),
        ([META], Spelling(False, False, True)),
        ([META | {"prepend_scheme": "first"}], Spelling(False, False, True)),
        ([META | {"prepend_scheme": "never"}], Spelling(False, False, False)),
        ([META | {"replacement": "_"}], None),
        ([SPACE | {"content": "-"}], None),
        ([SPACE, STRIP | {"start": 2}], None),
        ([{"type": "WordPiece", "prefix": "##"}], None),
        ([{"type": "ByteLevel"}, FUSE], None),
        ([], None),
    ],
)
def test_decoders_that_are_understood(steps: list[dict], want: Spelling | None) -> None:
    assert spelling_of({"type": "Sequence", "decoders": steps}) == want
    assert spelling_of(steps[0] if len(steps) == 1 else None) in (want, None)


@given(ids_of(demo()), st.booleans(), st.booleans())
def test_decode_is_the_librarys(ids: list[int], skip: bool, spaces: bool) -> None:
    library = transformers_demo(digits=True)
    want = library.decode(ids, skip_special_tokens=skip)
    assert demo().decode(ids, skip, spaces) == want


@given(ids_of(tiny()), st.booleans(), st.booleans())
def test_decode_of_sentencepiece_is_the_librarys(
    ids: list[int], skip: bool, prefix: bool
) -> None:
    """Up to ill-formed bytes: the library then replaces each byte of the whole run."""
    tokenizer = tiny(prefix)
    library = build_tokenizer(tiny_metadata(add_space_prefix=prefix))
    shown = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    got = tokenizer.decode(ids, skip)
    try:
        b"".join(map(tokenizer.token_bytes, shown)).decode()
    except UnicodeDecodeError:
        assert "\ufffd" in got
    else:
        assert got == library.decode(ids, skip_special_tokens=skip)


@given(TEXT.map(demo_text))
def test_token_bytes_add_up_to_the_text(text: str) -> None:
    """C24: exact bytes, also of tokens that are parts of characters."""
    ids = demo().encode(text)
    assert b"".join(map(demo().token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("tokenizer", [demo(), tiny()], ids=["demo", "tiny"])
def test_token_str_is_distinct(tokenizer: Tokenizer) -> None:
    """C27: two ids never share a string, so a dictionary keeps both."""
    strings = [tokenizer.token_str(i) for i in range(tokenizer.vocab_size)]
    assert len(set(strings)) == tokenizer.vocab_size


def test_token_str_reads_well() -> None:
    def show(tokenizer: Tokenizer, token: str) -> str:
        token_id = tokenizer.token_id(token)
        assert token_id is not None and tokenizer.token(token_id) == token
        return tokenizer.token_str(token_id)

    assert show(demo(), "Ġthe") == " the" and show(demo(), "the") == "the"
    assert show(demo(), "<|im_end|>") == "<|im_end|>"
    assert show(demo(), "ðŁ") == "bytes:\\xf0\\x9f"
    assert show(tiny(), "▁the") == " the" and show(tiny(), "the") == "the"
    assert show(tiny(), "<0x41>") == "A" and show(tiny(), "<0x74>") == "<0x74>"


def test_added_tokens_stand_as_they_are() -> None:
    """C21: no spaces invented around them, with either flag."""
    tokenizer = tiny(prefix=False)
    text = "<t>la</t>1<s>"
    ids = tokenizer.encode(text, False)
    assert [tokenizer.token(i) for i in ids] == ["<t>", "la", "</t>", "1", "<s>"]
    for spaces in (True, False):
        assert tokenizer.decode(ids, False, spaces) == text
        assert tokenizer.decode(ids, True, spaces) == "<t>la</t>1"


def test_added_token_of_alphabet_characters_is_its_own_text() -> None:
    """C21: `é` is a byte in GPT-2's alphabet, but not inside an added token."""
    tokens = [*byte_alphabet().values(), "<é>"]
    keys = {"model": "gpt2", "tokens": tokens, "token_type": [1] * 256 + [4]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("<é>") == [256] and tokenizer.decode([256]) == "<é>"


@pytest.mark.parametrize("bad", [-1, 49152, 10**12])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    for call in (demo().token, demo().token_bytes, demo().token_str):
        with pytest.raises(UserError, match=str(bad)):
            call(bad)
    with pytest.raises(UserError, match=f"{bad}.*0 to 49151"):
        demo().decode([17, bad])


# Folders.


def write_folder(folder: Path, config: dict, **files: str) -> Path:
    """A model folder around the tiny vocabulary."""
    library = build_tokenizer(tiny_metadata())
    library.enable_truncation(4)
    library.enable_padding(length=9)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_folder_equals_gguf(tmp_path: Path) -> None:
    """And takes no notice of the truncation and padding that the file carries."""
    bos = {"content": "<s>", "special": True}
    config = {"bos_token": bos, "eos_token": "</s>", "chat_template": "from config"}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, config))
    text = "<t>the cat</t> sat, 12 Ω🦙 and so on"
    for some in (text, "la"):
        assert tokenizer.encode(some) == tiny().encode(some)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.special_ids == tiny().special_ids == {0, 1, 2}
    assert tokenizer.added_ids == {0, 1, 2, 3, 4}
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.chat_template == "from config"
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace(
        "<t>", "<t> ", 1
    ).replace("</t> ", "</t>  ")


def test_where_the_chat_template_is_found(tmp_path: Path) -> None:
    several = [
        {"name": "tool_use", "template": "t"},
        {"name": "default", "template": "d"},
    ]
    folder = write_folder(tmp_path, {"chat_template": several})
    assert Tokenizer.from_folder(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).chat_template == "file"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.from_folder(folder).chat_template is None
    (folder / "chat_template.json").write_text('{"chat_template": "old"}')
    assert Tokenizer.from_folder(folder).chat_template == "old"


def test_names_and_tokens_only_in_the_configuration(tmp_path: Path) -> None:
    think = {"content": "<think>", "special": False, "normalized": False}
    listed = {"999": think, "2": {"content": "</s>", "special": False}}
    config = {"eos_token": None, "added_tokens_decoder": listed}
    names = json.dumps({"eos_token": {"content": "</s>"}})
    folder = write_folder(tmp_path, config, special_tokens_map__json=names)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_id == 2 and tokenizer.bos_id is None
    assert 2 in tokenizer.special_ids, "tokenizer.json has the last word"
    think_id = tokenizer.token_id("<think>")
    assert think_id == tiny().vocab_size and think_id not in tokenizer.special_ids
    assert tokenizer.decode([think_id]) == "<think>"


def test_folder_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="adapter in pagedattn/model"):
        Tokenizer.from_folder(tmp_path)


def test_wordpiece_decodes_whole_but_does_not_stream(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"[UNK]": 0, "un": 1, "##do": 2}, unk_token="[UNK]")
    )
    library.decoder = tokenizers.decoders.WordPiece()
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("undo un")) == "undo un"
    with pytest.raises(NotSupported, match="can't be streamed"):
        tokenizer.pieces()
