"""The tests' draft model with other tokenizers: permuted ids, missing tokens, another BPE, single bytes."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EMBED = "model.embed_tokens.weight"
Piece = Sequence[int]  # a token's embedding is the mean of these rows of the source's


def permuted(source: Path, folder: Path) -> Path:
    """The model with permuted token ids, saved to `folder`, which is returned, as by the functions below."""
    raw, size = _tokenizer(source), len(_tokenizer(source)["model"]["vocab"])
    new = list(range(size))
    random.Random(0).shuffle(new)
    return _write(source, folder, _renumbered(raw, dict(enumerate(new))), _by_id(dict(enumerate(new))))


def reduced(source: Path, folder: Path, every: int) -> Path:
    """The model without every `every`-th merged token, and those merged from them; later ids move down."""
    raw = _tokenizer(source)
    gone, merges = set[str](), list[list[str]]()
    for number, (left, right) in enumerate(raw["model"]["merges"]):
        if number % every == every - 1 or left in gone or right in gone:
            gone.add(left + right)
        else:
            merges.append([left, right])
    merges = [m for m in merges if m[0] + m[1] not in gone]
    vocab = {token: i for token, i in raw["model"]["vocab"].items() if token not in gone}
    raw["model"] |= {"vocab": vocab, "merges": merges}
    kept = sorted(vocab.values())
    new = {old: i for i, old in enumerate(kept)}
    return _write(source, folder, _renumbered(raw, new), _by_id(new))


def trained(source: Path, folder: Path, texts: Iterable[str], size: int) -> Path:
    """The model with a BPE of `size` tokens trained on `texts`, with other pieces and no special tokens."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[no-untyped-call]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[no-untyped-call]
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # type: ignore[no-untyped-call]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return _written(source, folder, tokenizer)


def lone_bytes(source: Path, folder: Path) -> Path:
    """The model with one token per byte."""
    return trained(source, folder, [], 256)


def _written(source: Path, folder: Path, tokenizer: Any) -> Path:
    old: Any = Tokenizer.from_file(str(source / "tokenizer.json"))
    old_ids = old.get_vocab(False)
    pieces: dict[int, Piece] = {}
    for token, i in tokenizer.get_vocab(True).items():
        text = tokenizer.decode([i])
        whole = "\ufffd" not in text
        pieces[i] = old.encode(text, add_special_tokens=False).ids if whole else [old_ids[c] for c in token]
    return _write(source, folder, json.loads(tokenizer.to_str()), [pieces[i] for i in range(len(pieces))])


def _tokenizer(source: Path) -> dict[str, Any]:
    return json.loads((source / "tokenizer.json").read_text())


def _renumbered(raw: dict[str, Any], new: dict[int, int]) -> dict[str, Any]:
    raw["model"]["vocab"] = {token: new[i] for token, i in raw["model"]["vocab"].items()}
    for token in raw["added_tokens"]:
        token["id"] = new[token["id"]]
    raw["added_tokens"].sort(key=lambda token: token["id"])
    return raw


def _by_id(new: dict[int, int]) -> list[Piece]:
    old = {i: o for o, i in new.items()}
    return [[old[i]] for i in range(len(old))]


def _write(source: Path, folder: Path, tokenizer: dict[str, Any], pieces: Sequence[Piece]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    old_VH = tensors[EMBED]
    tensors[EMBED] = torch.stack([old_VH[list(ids)].float().mean(0) for ids in pieces]).to(old_VH.dtype)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"vocab_size": len(pieces)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(source / "generation_config.json", folder)
    return folder
