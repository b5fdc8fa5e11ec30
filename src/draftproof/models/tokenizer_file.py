"""Reads a folder's tokenizer.json: the whole tokenizer, or only its vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from draftproof.schema import read_json, section

NAME = "tokenizer.json"
BROKEN = "\ufffd"  # decoded for bytes that are not (yet) a complete character


def open_tokenizer(directory: Path) -> Tokenizer | None:
    """The folder's tokenizer without truncation and padding; None if there is none."""
    path = directory / NAME
    if not path.is_file():
        return None
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"{path}: cannot be read ({error}); download it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_vocabulary(directory: Path) -> dict[str, int] | None:
    """The id of each token except added ones, several times faster than through the tokenizer; None without a file or
    for an unknown form of vocabulary."""
    path = directory / NAME
    if not path.is_file():
        return None
    vocab = section(read_json(path), "model", str(path)).get("vocab")
    if isinstance(vocab, list):  # a Unigram model's: pairs of piece and score
        pairs = all(isinstance(pair, list) and pair for pair in vocab)
        return {str(pair[0]): i for i, pair in enumerate(vocab)} if pairs else None
    return vocab if isinstance(vocab, dict) else None
