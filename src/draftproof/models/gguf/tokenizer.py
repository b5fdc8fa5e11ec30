"""Converts the tokenizer in a GGUF file's metadata to files that the `tokenizers` library reads.

A file holds the vocabulary, and merges or scores. Its pre-tokenizer is named by `tokenizer.ggml.pre`; the expressions
below are those of the tokenizer.json files that the models were published with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from draftproof.models.gguf.file import GgufFile
from draftproof.models.gguf.layout import CONTROL, NORMAL, USER_DEFINED
from draftproof.models.tokenizer_file import NAME
from draftproof.schema import shown

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_QWEN2 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
_SPACE = "\u2581"  # how sentencepiece writes a space


@dataclass(frozen=True, slots=True)
class Cut:
    """The pre-tokenizer of a byte-level tokenizer. `split`: an expression, "" for GPT-2's; `digits`: first split into
    single digits; `composed`: Unicode normal form C; `whole_words`: a piece that is a token is not merged; `starts`:
    text begins with the bos token if the file does not say."""

    split: str = ""
    digits: bool = False
    composed: bool = False
    whole_words: bool = False
    starts: bool = False


_OF_LLAMA3 = Cut(_LLAMA3, whole_words=True, starts=True)
_OF_QWEN2 = Cut(_QWEN2, composed=True)
CUTS: Mapping[str, Cut] = {
    "gpt-2": Cut(),
    "smollm": Cut(digits=True),
    "llama-bpe": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "falcon3": Cut(_LLAMA3),
    "qwen2": _OF_QWEN2,
    "deepseek-r1-qwen": Cut(_QWEN2, composed=True, starts=True),
    "tekken": Cut(_TEKKEN, whole_words=True, starts=True),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's vocabulary: each token's text and type, and the ids of named tokens (bos, eos, ...)."""

    tokens: list[str]
    types: list[int]
    named: Mapping[str, int]

    def text(self, name: str) -> str | None:
        """The text of the named token, or None."""
        return self.tokens[self.named[name]] if name in self.named else None


def write(file: GgufFile, folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; nothing if the file has no vocabulary.

    ValueError for an unknown kind of tokenizer or pre-tokenizer.
    """
    model = file.field("tokenizer.ggml.model", str, "no_vocab")
    if model == "no_vocab":
        return
    if model not in ("gpt2", "llama"):
        raise file.unsupported("tokenizer.ggml.model", ("gpt2", "llama"))
    vocabulary = _vocabulary(file, vocab_size)
    tokenizer, starts = (_byte_level if model == "gpt2" else _sentencepiece)(file, vocabulary)
    _add_special(tokenizer, vocabulary)
    _add_ends(tokenizer, file, vocabulary, starts)
    tokenizer.save(str(folder / NAME))
    config: dict[str, Any] = {f"{name}_token": vocabulary.text(name) for name in ("bos", "eos", "unk", "pad")}
    # this class uses tokenizer.json unchanged; a family's class would apply its own pre-tokenizer
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config["chat_template"] = file.field("tokenizer.chat_template", str)
    stated = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated, indent=1), encoding="utf-8")


def _vocabulary(file: GgufFile, vocab_size: int) -> Vocabulary:
    tokens = file.field("tokenizer.ggml.tokens", list, [])
    types = file.field("tokenizer.ggml.token_type", list, [NORMAL] * len(tokens))
    if not tokens or len(tokens) > vocab_size or not all(isinstance(token, str) for token in tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} tokens: must be texts, at least one and at most the "
            f"{vocab_size} that have a row of token_embd.weight; download the file again"
        )
    if len(types) != len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens; download the "
            "file again"
        )
    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.field(f"tokenizer.ggml.{key}_token_id", int)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ValueError(
                f"{file.path}: tokenizer.ggml.{key}_token_id={token_id}: must be less than the {len(tokens)} tokens "
                "that there are; download the file again"
            )
        named[name] = token_id
    return Vocabulary(tokens, types, named)


def _byte_level(file: GgufFile, vocabulary: Vocabulary) -> tuple[Any, bool]:
    """(a tokenizer of GPT-2's kind, whether texts begin with the bos token by default)."""
    name = file.field("tokenizer.ggml.pre", str)
    if name not in CUTS:
        raise file.unsupported("tokenizer.ggml.pre", CUTS)
    cut = CUTS[name]
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokenizer: Any = Tokenizer(_bpe(file, ids, _merges(file), ignore_merges=cut.whole_words))
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits else []
    if cut.split:
        first.append(pre_tokenizers.Split(Regex(cut.split), behavior="isolated"))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.split)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.starts


def _sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> tuple[Any, bool]:
    """(a tokenizer of Llama 2's or Gemma's kind, True: texts begin with the bos token by default)."""
    # the file stores runs of spaces as plain spaces, for engines that search them in the text
    tokens = [token if token.strip(" ") else _SPACE * len(token) for token in vocabulary.tokens]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = _merges(file) if "tokenizer.ggml.merges" in file.fields else _pairs(ids, _ranks(file, tokens))
    bpe = _bpe(file, ids, merges, unk_token=vocabulary.text("unk"), fuse_unk=True, byte_fallback=True)
    tokenizer: Any = Tokenizer(bpe)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.field("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _bpe(file: GgufFile, ids: Mapping[str, int], merges: Sequence[tuple[str, str]], **settings: Any) -> Any:
    try:
        return BPE(vocab=dict(ids), merges=list(merges), **settings)
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(
            f"{file.path}: tokenizer.ggml.merges: do not fit the tokens ({shown(str(error))}); download the file again"
        ) from error


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    """Pairs of pieces to merge, in order of priority."""
    found = []
    for merge in file.field("tokenizer.ggml.merges", list, []):
        left, space, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not space:
            raise ValueError(
                f"{file.path}: tokenizer.ggml.merges: {shown(merge)}: must be two pieces with a space between; "
                "download the file again"
            )
        found.append((left, right))
    return found


def _ranks(file: GgufFile, tokens: Sequence[str]) -> list[float]:
    """Merge priority of each token, higher first: its score; for Gemma, whose scores say nothing, its negative id."""
    if file.field("general.architecture", str) == "gemma3":
        return [-float(i) for i in range(len(tokens))]
    scores = file.field("tokenizer.ggml.scores", list, [])
    if len(scores) != len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens; download the file "
            "again"
        )
    return [float(score) for score in scores]


def _pairs(ids: Mapping[str, int], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that forms a token, in sentencepiece's merge order: by the rank of the result, ties with the
    longer left piece first."""
    found = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-ranks[i], -cut, cut - len(token), left, right))
    found.sort(key=lambda pair: pair[:3])
    return [pair[3:] for pair in found]


def _add_special(tokenizer: Any, vocabulary: Vocabulary) -> None:
    """Add tokens that are matched whole before pre-tokenizing: control tokens (special) and user-defined ones."""
    named = set(vocabulary.named.values())
    pairs = list(enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)))
    special = [text for i, (text, kind) in pairs if kind == CONTROL or i in named]
    others = [text for i, (text, kind) in pairs if kind == USER_DEFINED and i not in named]
    known = tokenizer.get_vocab(with_added_tokens=False)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    # runs of spaces have another spelling in the vocabulary and result from merges, so they are left out
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in others if text in known])


def _add_ends(tokenizer: Any, file: GgufFile, vocabulary: Vocabulary, starts: bool) -> None:
    """Add bos and eos around a text if the file says so."""
    around = {
        "bos": file.field("tokenizer.ggml.add_bos_token", bool, starts),
        "eos": file.field("tokenizer.ggml.add_eos_token", bool, False),
    }
    texts = {name: vocabulary.text(name) for name, wanted in around.items() if wanted}
    ends = {name: text for name, text in texts.items() if text is not None}
    if not ends:
        return
    before, after = ([f"{ends[name]}:0"] if name in ends else [] for name in ("bos", "eos"))
    single = [*before, "$A:0", *after]
    second = [piece[:-1] + "1" for piece in (*before, "$B:0", *after)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *second],
        special_tokens=[(text, vocabulary.named[name]) for name, text in ends.items()],
    )
