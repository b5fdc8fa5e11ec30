"""Every family gives transformers' fp64 logits, greedy text and inner states, within fp32's rounding; see
`tests/exact.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.models.decoder import Decoder
from draftproof.runtime import native
from draftproof.runtime.native import Library
from tests.helpers import Paged, greedy, load_decoder, run_rows
from tests.models.reference import MODEL_CASES, States, exact, save
from tests.slow import slow

A = [(i * 37 + 5) % 199 for i in range(90)]
B = [(i * i * 11 + 3) % 199 for i in range(41)]


@dataclass
class Pair:
    theirs: Any
    ours: Decoder
    directory: Path
    _known: dict[tuple[int, ...], States] = field(default_factory=dict)

    def exact(self, tokens: list[int]) -> States:
        """transformers' result in fp64."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = exact(self.theirs, tokens)
        return self._known[key]


@pytest.fixture(scope="module")
def library() -> Library:
    loaded = native.load()
    if loaded is None:
        pytest.skip("no C++ compiler here")
    return loaded


@pytest.fixture(scope="module", params=MODEL_CASES, ids=list(MODEL_CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case, directory = MODEL_CASES[request.param], tmp_path_factory.mktemp("model")
    theirs = save(case, directory)
    shards = len(list(directory.glob("*.safetensors")))
    assert (shards > 1) == ("sharded" in request.param)
    return Pair(theirs, load_decoder(directory), directory)


def test_logits_of_two_requests_in_one_ragged_pass(pair: Pair) -> None:
    out = run_rows(pair.ours, Paged(pair.ours.kv), [(2, 0, A), (0, 0, B)])
    logits = pair.ours.logits(out.hidden_TH)
    assert logits.dtype == torch.float32
    pair.exact(A).logits.check(logits[: len(A)])
    pair.exact(B).logits.check(logits[len(A) :])


def test_logits_with_compiled_operators(pair: Pair, library: Library) -> None:
    ours = load_decoder(pair.directory, library=library)
    paged = Paged(ours.kv, library=library)
    outs = [run_rows(ours, paged, [(2, at, A[at : at + size])]) for at, size in ((0, 60), (60, 29), (89, 1))]
    logits = ours.logits(torch.cat([out.hidden_TH for out in outs]))
    pair.exact(A).logits.check(logits)


def test_a_pass_for_a_few_rows_gives_their_bits_and_stores_all(pair: Pair) -> None:
    """Rows 50, 89 and 130 of two texts are wanted: the last layer skips the others."""
    if not pair.ours.leaves_rows:
        pytest.skip("each layer is given an input of its own: no rows are left out")
    pieces, wanted_M = [(2, 0, A), (0, 0, B)], torch.tensor([50, 89, 130])
    whole, few = Paged(pair.ours.kv), Paged(pair.ours.kv)
    expected_TH = run_rows(pair.ours, whole, pieces).hidden_TH
    out = run_rows(pair.ours, few, pieces, taps=(0, 1), only_M=wanted_M)
    assert torch.equal(out.hidden_TH, expected_TH[wanted_M])
    for one, other in zip(whole.cache.layers, few.cache.layers, strict=True):
        assert torch.equal(one.k, other.k) and torch.equal(one.v, other.v)
    after = [run_rows(pair.ours, paged, [(2, len(A), [7])]).hidden_TH for paged in (whole, few)]
    assert torch.equal(*after)


@slow
def test_logits_in_chunks_and_single_rows_of_mixed_requests(pair: Pair) -> None:
    paged = Paged(pair.ours.kv)
    texts = {1: A, 3: B}
    done = {1: 0, 3: 0}
    rows: dict[int, list[torch.Tensor]] = {1: [], 3: []}
    sizes = [3, 7, 1, 7, 3, 1, 1]
    step = 0
    while any(done[slot] < len(texts[slot]) for slot in texts):
        pieces = []
        for turn, (slot, text) in enumerate(texts.items()):
            size = sizes[(step + 2 * turn) % len(sizes)]
            if fresh := text[done[slot] : done[slot] + size]:
                pieces.append((slot, done[slot], fresh))
        out = run_rows(pair.ours, paged, pieces)
        parts = out.hidden_TH.split([len(fresh) for _, _, fresh in pieces])
        for (slot, _, fresh), part in zip(pieces, parts, strict=True):
            rows[slot].append(pair.ours.logits(part))
            done[slot] += len(fresh)
        step += 1
    for slot, text in texts.items():
        pair.exact(text).logits.check(torch.cat(rows[slot]))


@slow
def test_greedy_text_of_64_tokens(pair: Pair) -> None:
    """Each token is the likeliest one in fp64; if two are equally likely within fp32's rounding, either of them."""
    ids = greedy(pair.ours, B, 64)
    assert len(set(ids)) > 5, "a text that repeats one token shows nothing"
    logits = pair.exact([*B, *ids]).logits
    ahead_TV = logits.value[len(B) - 1 : -1]
    chosen_T = ahead_TV.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert (ahead_TV.max(-1).values - chosen_T).max().item() <= 2 * logits.bound


def test_taps_are_the_streams_entering_the_layers(pair: Pair) -> None:
    theirs = pair.exact(A)
    assert len(theirs.streams) == pair.ours.config.num_layers + 1
    out = run_rows(pair.ours, Paged(pair.ours.kv), [(0, 0, A)], taps=(2, 0, 1), final=True)
    assert len(out.taps) == 4
    for found, expected in zip(
        out.taps, [*(theirs.streams[i] for i in (2, 0, 1)), theirs.final], strict=True
    ):
        expected.check(found)
    theirs.final.check(out.hidden_TH)
    different = (theirs.streams[2].value - theirs.final.value).abs().max().item()
    assert different > 0.01, "before and after the final norm must differ"
