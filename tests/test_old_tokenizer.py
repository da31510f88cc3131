"""A folder from before tokenizer.json: read through transformers, no code run."""

import json

import pytest
from tokenizers import Tokenizer as Library

from pagedattn.errors import UserError
from pagedattn.model.tokenizer import read_tokenizer
from pagedattn.testing import make_tiny_model
from pagedattn.text.tokenizer import Tokenizer


def old_folder(tmp_path):
    """GPT-2's layout: vocab.json and merges.txt."""
    new = make_tiny_model(tmp_path / "new")
    old = tmp_path / "old"
    old.mkdir()
    vocabulary = Library.from_file(str(new / "tokenizer.json")).get_vocab()
    vocabulary["<|endoftext|>"] = len(vocabulary)
    (old / "vocab.json").write_text(json.dumps(vocabulary))
    (old / "merges.txt").write_text("#version: 0.2\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (old / "tokenizer_config.json").write_text(json.dumps(config))
    return new, old


def test_vocab_and_merges(tmp_path):
    new, old = old_folder(tmp_path)
    text = "Grüße, 世界! 12 3"
    want = Tokenizer.from_folder(new)
    got = read_tokenizer(old)
    assert got.encode(text) == want.encode(text)
    assert got.decode(got.encode(text)) == text


def test_code_in_the_folder_is_not_run(tmp_path):
    _, old = old_folder(tmp_path)
    marker = tmp_path / "ran"
    (old / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass T: pass\n")
    config = {"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "T"}
    (old / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no tokenizer.json"):
        read_tokenizer(old)
    assert not marker.exists()


def test_nothing_to_read(tmp_path):
    with pytest.raises(UserError, match="no tokenizer.json"):
        read_tokenizer(tmp_path)
