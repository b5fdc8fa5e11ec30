"""The tokens that two tokenizers share, matched by their text, and a draft model's weights in its target's ids.

Shapes: V target vocabulary, D draft vocabulary, C draft columns whose token the target also has, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.models.weights import Weights

_EMBEDDINGS = ("embed_tokens.weight", "embed_tokens_per_layer.weight")
_HEAD = "lm_head.weight"
_AT_ONCE = 4096  # rows averaged together


@dataclass(frozen=True, slots=True)
class TokenMap:
    """A map from target tokens to draft tokens. `draft_V`: int64, the draft id with each target token's text, or -1.
    `pieces`: the draft's encoding of the text of target tokens without such an id."""

    draft_V: Tensor
    pieces: Mapping[int, Sequence[int]]
    num_tokens: int  # ids below V that are tokens; models may have unused ids

    @property
    def num_common(self) -> int:
        return int((self.draft_V >= 0).sum())

    @property
    def coverage(self) -> float:
        """The share of the target's tokens that the draft also has."""
        return self.num_common / max(1, self.num_tokens)

    def common_ids(self) -> Tensor | None:
        """Target id of each draft column, [C], ascending; None if every target id has a column."""
        return None if self.num_common == len(self.draft_V) else (self.draft_V >= 0).nonzero()[:, 0]


def compare(target: Any, draft: Any, target_size: int, draft_size: int) -> TokenMap:
    """The map between two tokenizers; sizes: number of ids of the models. Of tokens with equal text the lowest draft id
    counts."""
    draft_texts = token_texts(draft)
    target_texts = token_texts(target)
    draft_of = {text: i for i, text in sorted(draft_texts.items(), reverse=True) if i < draft_size}
    draft_V = torch.full((target_size,), -1, dtype=torch.int64)
    missing: dict[int, bytes] = {}
    for i, text in target_texts.items():
        if i < target_size:
            draft_V[i] = draft_of.get(text, -1)
            if text not in draft_of:
                missing[i] = text
    num_tokens = sum(i < target_size for i in target_texts)
    return TokenMap(draft_V, _encoded(missing, draft, draft_of, draft_size), num_tokens)


def token_texts(tokenizer: Any) -> dict[int, bytes]:
    """The bytes of each token, independent of how its tokenizer spells spaces and bytes."""
    added = {i: token.content.encode() for i, token in tokenizer.get_added_tokens_decoder().items()}
    kind = repr(tokenizer.decoder)
    byte_of = _byte_alphabet() if "ByteLevel" in kind else None
    plain = {i: _bytes_of(token, byte_of) for token, i in tokenizer.get_vocab(False).items()}
    return plain | added


def _bytes_of(token: str, byte_of: Mapping[str, int] | None) -> bytes:
    if byte_of is not None and all(c in byte_of for c in token):
        return bytes(byte_of[c] for c in token)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character of the byte-level alphabet: printable bytes as they are, the others from chr(256) on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(shown)]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def _encoded(
    texts: Mapping[int, bytes], draft: Any, draft_of: Mapping[bytes, int], draft_size: int
) -> dict[int, list[int]]:
    """Each text in draft tokens: its encoding, or byte by byte if the text is not valid UTF-8."""
    whole: dict[int, str] = {}
    pieces: dict[int, list[int]] = {}
    for i, text in texts.items():
        try:
            whole[i] = text.decode()
        except UnicodeDecodeError:
            pieces[i] = [draft_of[b] for b in (bytes((byte,)) for byte in text) if b in draft_of]
    encoded = draft.encode_batch(list(whole.values()), add_special_tokens=False)
    pieces |= {i: [p for p in e.ids if p < draft_size] for i, e in zip(whole, encoded, strict=True)}
    return pieces


def translated(weights: Weights, token_map: TokenMap, *, tied: bool) -> Weights:
    """The model's weights in target ids: embeddings [V, H], a head with the C common columns.

    A token without counterpart gets the mean of its pieces' embeddings.
    """
    embed = next((n for n in weights.names() if n.endswith(_EMBEDDINGS[0])), _EMBEDDINGS[0])
    kept_C = token_map.draft_V[token_map.draft_V >= 0]

    def read(name: str) -> Tensor:
        if name == _HEAD:
            return weights.get(embed if tied else _HEAD)[kept_C]
        tensor_DX = weights.get(name)
        return _in_target_ids(tensor_DX, token_map) if name.endswith(_EMBEDDINGS) else tensor_DX

    return Weights(weights.where, {*weights.names(), _HEAD}, read)


def _in_target_ids(table_DX: Tensor, token_map: TokenMap) -> Tensor:
    table_VX = table_DX[token_map.draft_V.clamp(min=0)]
    table_VX[token_map.draft_V < 0] = 0
    pieces = [(i, ids) for i, ids in token_map.pieces.items() if ids]
    for start in range(0, len(pieces), _AT_ONCE):
        some = pieces[start : start + _AT_ONCE]
        counts = torch.tensor([len(ids) for _, ids in some])
        owner = torch.arange(len(some)).repeat_interleave(counts)
        flat = torch.tensor([piece for _, ids in some for piece in ids])
        sums = torch.zeros(len(some), table_DX.shape[1]).index_add_(0, owner, table_DX[flat].float())
        table_VX[torch.tensor([i for i, _ in some])] = (sums / counts[:, None]).to(table_DX.dtype)
    return table_VX
