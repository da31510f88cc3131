"""One vocabulary: text to ids, ids to text, and what each id is in bytes.

Knows how a `tokenizer.json` folder and a GGUF file describe a vocabulary, its special
tokens and its chat template. Does not know messages, requests, or text in progress;
anything that can encode plugs in as a `Backend`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from pagedattn.errors import NotSupported, UserError
from pagedattn.text.gguf import build_tokenizer
from pagedattn.text.pieces import Spelling, spelling_of

_NAMES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
_GGUF_NAMES = {"unk": "unknown", "pad": "padding", "sep": "seperator"}


class Backend(Protocol):
    """What an encoder must do to serve as a Tokenizer's engine."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; with `add_special_tokens` also BOS/EOS as the model wants."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of valid `ids`; asked only of vocabularies without a spelling."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Every token by id, and how ids become bytes.

    `tokens[id]` is the raw piece ("" where an id has none). `spelling` None means
    that text is not a concatenation of pieces. `special` ⊆ `added`: the ids that
    `skip_special_tokens` leaves out, and those matched whole in raw text.
    """

    tokens: Sequence[str]
    spelling: Spelling | None
    special: frozenset[int]
    added: frozenset[int]

    def pieces(self) -> list[bytes] | None:
        """The bytes of every id, or None without a spelling."""
        if self.spelling is None:
            return None
        piece, added = self.spelling.piece, self.added
        return [piece(token, i in added) for i, token in enumerate(self.tokens)]


class Tokenizer:
    """Text ⇄ ids for one model. Immutable; safe to share between threads.

    `special_tokens` names the model's own: {"bos_token": "<s>", …}, as chat templates
    read them. `chat_template` is its Jinja source, None where the model has none.
    """

    def __init__(
        self,
        backend: Backend,
        vocabulary: Vocabulary,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
    ) -> None:
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.special_ids = vocabulary.special
        self.added_ids = vocabulary.added
        self.vocab_size = len(vocabulary.tokens)
        self.strip_lead = bool(vocabulary.spelling and vocabulary.spelling.strip_lead)
        self._backend = backend
        self._tokens = vocabulary.tokens
        self._pieces = vocabulary.pieces()
        self._ids = {token: i for i, token in enumerate(vocabulary.tokens) if token}
        self.bos_id = self._named("bos_token")
        self.eos_id = self._named("eos_token")

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Read a Hugging Face folder that has a tokenizer.json.

        BOS and EOS are added as tokenizer.json's post-processor says. Raises
        NotSupported where there is no tokenizer.json.
        """
        folder = Path(path)
        library = _read_library(folder)
        config = _read_json(folder / "tokenizer_config.json")
        _add_missing(library, config)
        names = _folder_names(folder, config)
        return cls._of_library(library, names, _folder_template(folder, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build from a GGUF file's metadata (`tokenizer.*` keys, plain values).

        Raises NotSupported naming a vocabulary or pre-tokenizer kind not built.
        """
        library = build_tokenizer(metadata)
        template = metadata.get("tokenizer.chat_template")
        return cls._of_library(library, _gguf_names(metadata), template)

    @classmethod
    def _of_library(
        cls,
        library: tokenizers.Tokenizer,
        names: Mapping[str, str],
        template: str | None,
    ) -> "Tokenizer":
        return cls(_Library(library), _vocabulary(library), names, template)

    # Text to ids and back.

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelled out in it become their ids.

        By default BOS/EOS are added as the model wants, even where the text already
        begins with BOS: a rendered chat template, which writes its own, is encoded
        with `add_special_tokens=False`. Raises UserError for lone surrogates.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"text is not valid Unicode: lone surrogate at index {error.start}",
                param="prompt",
            ) from error
        return self._backend.encode(text, add_special_tokens)

    def decode(
        self,
        ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of `ids`: their bytes in a row, read as UTF-8, each ill-formed stretch
        replaced by one U+FFFD.

        No decoder here invents a space beside an added token, so both values of
        `spaces_between_special_tokens` give the same text. Raises UserError for an
        id outside the vocabulary.
        """
        ids = self.check_ids(ids)
        if self._pieces is None:
            return self._backend.decode(ids, skip_special_tokens)
        pieces, skip = self._pieces, self.special_ids if skip_special_tokens else ()
        text = b"".join([pieces[i] for i in ids if i not in skip]).decode(
            "utf-8", "replace"
        )
        return text.removeprefix(" ") if self.strip_lead else text

    def check_ids(self, ids: Iterable[int]) -> list[int]:
        """The ids as a list; UserError naming the first outside the vocabulary."""
        ids = list(ids)
        for i in ids:
            if not 0 <= i < self.vocab_size:
                last = self.vocab_size - 1
                raise UserError(
                    f"token id {i} is outside the vocabulary: 0 to {last}",
                    param="token_ids",
                )
        return ids

    # One token.

    def token(self, token_id: int) -> str:
        """The raw piece as the vocabulary spells it ('Ġthe', '▁the', '<0x0A>')."""
        self.check_ids([token_id])
        return self._tokens[token_id]

    def token_id(self, token: str) -> int | None:
        """The id of a raw piece, or None."""
        return self._ids.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes the token adds to a text, also where they are only a part
        of a character. A leading space is kept."""
        self.check_ids([token_id])
        if self._pieces is None:
            return self._tokens[token_id].encode()
        return self._pieces[token_id]

    def token_str(self, token_id: int) -> str:
        """The token as a reader sees it, distinct for distinct tokens: its text with
        the leading space kept; `bytes:\\xe2\\x80` where it is not whole characters;
        a byte token whose character is also a plain token keeps its raw piece."""
        raw, piece = self.token(token_id), self.token_bytes(token_id)
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
        shadowed = text != raw and self._ids.get(text.replace(" ", "▁")) is not None
        return raw if shadowed and raw.startswith("<0x") else text

    def pieces(self) -> Sequence[bytes]:
        """The bytes of every id, for streaming.

        Raises NotSupported for a vocabulary whose decoder is not a concatenation.
        """
        if self._pieces is None:
            raise NotSupported("this tokenizer's decoder can't be streamed")
        return self._pieces

    def _named(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._ids.get(token)


class _Library:
    """The `tokenizers` library as a Backend."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Unlike `encode`, the batch form lets other threads run meanwhile.
        return self._library.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._library.decode(ids, skip_special_tokens=skip_special_tokens)


def _vocabulary(library: tokenizers.Tokenizer) -> Vocabulary:
    ids = library.get_vocab(with_added_tokens=True)
    added = library.get_added_tokens_decoder()
    size = max([*ids.values(), *added], default=-1) + 1
    tokens = [""] * size
    for token, i in ids.items():
        tokens[i] = token
    for i, token in added.items():
        tokens[i] = token.content
    state = library.decoder and library.decoder.__getstate__()
    return Vocabulary(
        tokens,
        spelling_of(json.loads(state) if state else None),
        special=frozenset(i for i, token in added.items() if token.special),
        added=frozenset(added),
    )


# A folder.


def _read_library(folder: Path) -> tokenizers.Tokenizer:
    """tokenizer.json, without the truncation and padding some files carry."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise NotSupported(
            f"{file} does not exist; a model with another kind of tokenizer needs the "
            "transformers adapter in pagedattn/model"
        )
    library = tokenizers.Tokenizer.from_file(str(file))
    library.no_truncation()
    library.no_padding()
    return library


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def _add_missing(library: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json lists, in the order of their ids."""
    listed = config.get("added_tokens_decoder", {})
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if library.token_to_id(entry["content"]) is None:
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            kept = {name: entry[name] for name in flags if name in entry}
            library.add_tokens([tokenizers.AddedToken(entry["content"], **kept)])


def _folder_names(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """{"bos_token": text, …} from tokenizer_config.json, else special_tokens_map."""
    both = _read_json(folder / "special_tokens_map.json") | {
        name: value for name, value in config.items() if value is not None
    }
    named = {f"{name}_token": both.get(f"{name}_token") for name in _NAMES}
    return {name: _content(token) for name, token in named.items() if token}


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the configuration's (of several, 'default')."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    legacy = _read_json(folder / "chat_template.json")
    found = config.get("chat_template") or legacy.get("chat_template")
    if not isinstance(found, list):
        return found
    several = {entry["name"]: entry["template"] for entry in found}
    return several.get("default")


# A GGUF file.


def _gguf_names(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {}
    for name in _NAMES:
        key = f"tokenizer.ggml.{_GGUF_NAMES.get(name, name)}_token_id"
        if (token_id := metadata.get(key)) is not None:
            names[f"{name}_token"] = tokens[token_id]
    return names
