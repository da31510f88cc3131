"""Tokenizers of folders that have no tokenizer.json, by way of transformers.

The one place that asks transformers for anything at run time; it knows nothing of
models. Built in chapter 02.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from pagedattn.errors import UserError
from pagedattn.text.tokenizer import Tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer: its tokenizer.json, or what transformers makes of the
    older files (vocab.json and merges.txt, tokenizer.model).

    Runs no code from the folder. Raises UserError where there is nothing to read.
    """
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_folder(folder)
    from transformers import AutoTokenizer  # seconds to import, and rarely needed

    with TemporaryDirectory() as converted:
        try:
            found = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            found.save_pretrained(converted)
        except Exception as error:  # many kinds, all of them about the files
            raise UserError(
                f"tokenizer of {folder}: there is no tokenizer.json, and transformers "
                f"can't convert what is there: {error}",
                "tokenizer",
            ) from error
        return Tokenizer.from_folder(converted)
