"""What a token is in bytes: the one view that decoding, streaming and logprobs share.

Knows the three spellings in use (byte-level alphabet, metaspace `▁`, byte tokens
`<0xNN>`) and which of them a `tokenizers` decoder means. Does not know vocabularies
as a whole, requests, or text that is still being generated.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

METASPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary writes bytes as characters.

    `byte_level`: every character stands for one byte (GPT-2's alphabet). Otherwise
    `▁` stands for a space, and with `byte_tokens` a token `<0xNN>` is one byte.
    `strip_lead`: one space at the very start of a text is the encoder's own and is
    not part of the text.
    """

    byte_level: bool
    byte_tokens: bool = False
    strip_lead: bool = False

    def piece(self, token: str, added: bool = False) -> bytes:
        """The bytes that `token` adds to a text; an added token is its own text."""
        if self.byte_level:
            return token.encode() if added else _byte_level_bytes(token)
        if self.byte_tokens and (match := _BYTE_TOKEN.match(token)):
            return bytes([int(match[1], 16)])
        return token.replace(METASPACE, " ").encode()


def byte_alphabet() -> dict[int, str]:
    """GPT-2's byte → character table: printable Latin-1 as it is, the rest from 256 up.

    Source: the openai/gpt-2 encoder's `bytes_to_unicode`.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    table = {byte: chr(byte) for byte in printable}
    return table | {byte: chr(256 + i) for i, byte in enumerate(rest)}


# str.translate table: alphabet character → the Latin-1 character of its byte.
_TO_LATIN1 = str.maketrans({char: chr(byte) for byte, char in byte_alphabet().items()})
_ALPHABET = frozenset(byte_alphabet().values())


def _byte_level_bytes(token: str) -> bytes:
    """A token outside the alphabet stands for itself, as in `tokenizers`."""
    if _ALPHABET.issuperset(token):
        return token.translate(_TO_LATIN1).encode("latin-1")
    return token.encode()


def spelling_of(decoder: Mapping[str, Any] | None) -> Spelling | None:
    """The spelling that a `tokenizers` decoder (as JSON) undoes.

    None for decoders that are not a plain concatenation of pieces (WordPiece, CTC,
    none at all): such a vocabulary can be decoded as a whole but not streamed.
    """
    steps = list(_steps(decoder))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level=True)
    if not kinds or not all(map(_is_metaspace_step, steps)):
        return None
    strip = "Strip" in kinds or any(step.get("strips") for step in steps)
    return Spelling(False, byte_tokens="ByteFallback" in kinds, strip_lead=strip)


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Flatten nested sequences; a Metaspace step says whether it strips the lead."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    elif decoder["type"] == "Metaspace":
        strips = decoder.get("prepend_scheme", "always") != "never"
        yield dict(decoder) | {"strips": strips}
    else:
        yield dict(decoder)


def _is_metaspace_step(step: Mapping[str, Any]) -> bool:
    """One of the steps of which sentencepiece-like decoders are made."""
    match step["type"]:
        case "Fuse" | "ByteFallback":
            return True
        case "Metaspace":
            return step.get("replacement") == METASPACE
        case "Replace":
            pattern = step.get("pattern")
            return pattern == {"String": METASPACE} and step.get("content") == " "
        case "Strip":
            return (step.get("content"), step["start"], step["stop"]) == (" ", 1, 0)
    return False
