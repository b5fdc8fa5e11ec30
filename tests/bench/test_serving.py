"""What `bench/serving.py` makes its servers of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.clients import as_flag
from bench.models import with_words
from draftproof.frontend.text import Tokenizer


@pytest.mark.parametrize(
    ("name", "value", "flags"),
    [
        ("max_num_seqs", 4, ["--max-num-seqs", "4"]),
        ("model", None, []),
        ("enforce_eager", True, ["--enforce-eager"]),
        ("enforce_eager", False, ["--no-enforce-eager"]),
        ("speculative_config", {"method": "ngram"}, ["--speculative-config", '{"method": "ngram"}']),
    ],
)
def test_settings_are_flags(name: str, value: object, flags: list[str]) -> None:
    assert as_flag(name, value) == flags


def test_a_model_with_random_weights_has_a_word_for_each_id(tmp_path: Path) -> None:
    source, into = tmp_path / "source", tmp_path / "into"
    source.mkdir()
    into.mkdir()
    (source / "config.json").write_text(json.dumps({"vocab_size": 300, "hidden_size": 8}))
    tokenizer = Tokenizer(with_words(source, into))
    ids = [0, 299, 17, 17]
    assert tokenizer.decode(ids) == " 0 12b 11 11"
    assert json.loads((into / "config.json").read_text()) == {"vocab_size": 300, "hidden_size": 8}
