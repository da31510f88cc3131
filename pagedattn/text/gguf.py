"""A `tokenizers.Tokenizer` from the `tokenizer.ggml.*` metadata of a GGUF file.

Knows GGUF's two common vocabularies: `gpt2` (byte-level BPE, cut into words by the
named pre-tokenizer) and `llama` (sentencepiece BPE, whose merges are rebuilt from
scores). Does not read files and knows nothing of chat templates or decoding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from pagedattn.errors import NotSupported, UserError
from pagedattn.text.pieces import METASPACE

# tokenizer.ggml.token_type. 5, unused, needs no treatment.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# Ours: a sentencepiece token that is a run of spaces.
_SPACES_RUN = 0

# Words, as the models' own tokenizer.json files cut them before merging.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
_SIGNS, _SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_CL100K = "|".join([_CONTRACTION, _WORD, r"\p{N}{1,3}", _SIGNS, *_SPACES])
_QWEN = "|".join([_CONTRACTION, _WORD, r"\p{N}", _SIGNS, *_SPACES])
_TEKKEN = "|".join([*_CAMEL, r"\p{N}", _SIGNS_SLASH, *_SPACES])
_O200K = "|".join(
    [*(f"{word}{_CONTRACTION}?" for word in _CAMEL)]
    + [r"\p{N}{1,3}", _SIGNS_SLASH, *_SPACES]
)


@dataclass(frozen=True, slots=True)
class Words:
    """How one kind of byte-level vocabulary cuts text into words before merging.

    `pattern` None is GPT-2's own pattern; `digits` isolates each digit first;
    `whole_words`: a word that is a token is taken without looking at merges;
    `add_bos` is the default where the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Cut text into words, then spell each word in the byte alphabet."""
        steps = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), "isolated"))
        builtin = self.pattern is None
        steps.append(pre_tokenizers.ByteLevel(False, use_regex=builtin))
        return pre_tokenizers.Sequence(steps)


_GPT2 = Words()
_DIGITS = Words(digits=True)
_LLAMA3 = Words(_CL100K, whole_words=True, add_bos=True)

# tokenizer.ggml.pre → words. One line here supports one more kind.
WORDS: Mapping[str, Words] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "minerva-7b": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "dbrx": Words(_CL100K),
    "smaug-bpe": Words(_CL100K),
    "qwen2": Words(_QWEN, nfc=True),
    "deepseek-r1-qwen": Words(_QWEN),
    "tekken": Words(_TEKKEN, whole_words=True, add_bos=True),
    "gpt-4o": Words(_O200K),
    "llama4": Words(_O200K),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `metadata` describes, ready to encode.

    Raises NotSupported naming the vocabulary or pre-tokenizer kind that is not built,
    and UserError where the metadata has no vocabulary.
    """
    vocab = _Vocab.read(metadata)
    match kind := metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer, add_bos = _byte_level(vocab, metadata)
        case "llama":
            vocab = vocab.with_metaspace()
            tokenizer, add_bos = _sentencepiece(vocab, metadata), True
        case _:
            raise NotSupported(
                f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2', 'llama'"
            )
    tokenizer.add_special_tokens(_added(vocab, metadata, UNKNOWN, CONTROL))
    tokenizer.add_tokens(_added(vocab, metadata, USER_DEFINED))
    _add_template(tokenizer, vocab, metadata, add_bos)
    return tokenizer


@dataclass(frozen=True, slots=True)
class _Vocab:
    tokens: Sequence[str]
    types: Sequence[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> "_Vocab":
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not tokens:
            raise UserError("the GGUF file has no tokenizer.ggml.tokens")
        types = metadata.get("tokenizer.ggml.token_type")
        return cls(tokens, types or [NORMAL] * len(tokens))

    def with_metaspace(self) -> "_Vocab":
        """Runs of real spaces (Gemma's) respelled in `▁`: pieces like any other."""
        runs = {
            t: METASPACE * len(t) for t in self.tokens if t[1:] and not t.strip(" ")
        }
        typed = zip(self.tokens, self.types, strict=True)
        types = [_SPACES_RUN if token in runs else kind for token, kind in typed]
        return _Vocab([runs.get(token, token) for token in self.tokens], types)

    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def _byte_level(vocab: _Vocab, metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    words = _words(metadata.get("tokenizer.ggml.pre", "default"))
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", ())]
    model = models.BPE(vocab.ids(), merges, ignore_merges=words.whole_words)
    tokenizer = Tokenizer(model)
    if words.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = words.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, words.add_bos


def _words(name: str) -> Words:
    if name not in WORDS:
        known = ", ".join(WORDS)
        raise NotSupported(f"tokenizer.ggml.pre is {name!r}; supported are {known}")
    return WORDS[name]


def _pair(merge: str) -> tuple[str, str]:
    """'left right'; the left part may itself begin with a space."""
    cut = merge.index(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(vocab: _Vocab, metadata: Mapping[str, Any]) -> Tokenizer:
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise NotSupported("tokenizer.ggml.remove_extra_whitespaces is not supported")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab.ids(),
        list(_rebuilt_merges(vocab, metadata)),
        unk_token=None if unknown is None else vocab.tokens[unknown],
        fuse_unk=True,
        byte_fallback=BYTE in vocab.types,
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    return _with_metaspace(Tokenizer(model), prefix)


def _with_metaspace(tokenizer: Tokenizer, prefix: bool) -> Tokenizer:
    """Spaces are `▁`; with `prefix` each stretch of text begins with one of its own."""
    normal = [normalizers.Prepend(METASPACE)] if prefix else []
    normal.append(normalizers.Replace(" ", METASPACE))
    undo = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    undo += [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence(normal)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _rebuilt_merges(
    vocab: _Vocab, metadata: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Every cut of a normal token into two, tokens of the highest score first.

    sentencepiece joins the neighbours whose joint token scores highest; a merge list
    in that order does the same, with runs of spaces first, in the order of their ids
    (as transformers does for Gemma). Merges that a file carries are taken as they are.
    """
    if "tokenizer.ggml.merges" in metadata:
        return map(_pair, metadata["tokenizer.ggml.merges"])
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise UserError("a 'llama' vocabulary needs tokenizer.ggml.scores or merges")
    score = {
        token: value if kind == NORMAL else 1e9 - i
        for i, (token, kind, value) in enumerate(
            zip(vocab.tokens, vocab.types, scores, strict=True)
        )
        if kind in (NORMAL, _SPACES_RUN)
    }
    cuts = [
        (value, at, token)
        for token, value in score.items()
        for at in range(1, len(token))
        if token[:at] in score and token[at:] in score
    ]
    cuts.sort(key=lambda cut: cut[:2], reverse=True)
    return ((token[:at], token[at:]) for _, at, token in cuts)


def _added(vocab: _Vocab, metadata: Mapping[str, Any], *kinds: int) -> list[AddedToken]:
    """Tokens that are found in raw text as they are, before any merging.

    Phi-3's control tokens also swallow the white space after them.
    """
    phi3 = metadata.get("general.architecture") == "phi3"
    plain = {"<unk>", "<s>", "<|endoftext|>"}
    special = CONTROL in kinds
    return [
        AddedToken(
            token,
            normalized=False,
            special=special,
            rstrip=phi3 and special and token not in plain,
        )
        for token, kind in zip(vocab.tokens, vocab.types, strict=True)
        if kind in kinds
    ]


def _add_template(
    tokenizer: Tokenizer, vocab: _Vocab, metadata: Mapping[str, Any], add_bos: bool
) -> None:
    """Put BOS before and EOS after a text that asks for special tokens."""
    wanted = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in wanted}
    used = {n: vocab.tokens[ids[n]] for n in wanted if wanted[n] and ids[n] is not None}
    if used:
        before, after = [used[n] for n in ("bos",) if n in used], []
        after = [used[n] for n in ("eos",) if n in used]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, ids[name]) for name, token in used.items()],
        )
