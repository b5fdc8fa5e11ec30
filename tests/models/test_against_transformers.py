"""Every family gives the logits, the greedy text and the inner states that transformers gives, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.kernels import native
from draftproof.kernels.native import Library
from draftproof.models.decoder import Decoder
from tests.helpers import Paged, greedy, load_decoder, run_rows
from tests.models.reference import FORMS, save, states

A = [(i * 37 + 5) % 199 for i in range(90)]
B = [(i * i * 11 + 3) % 199 for i in range(41)]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-4)


@dataclass
class Pair:
    theirs: Any
    ours: Decoder
    directory: Path


@pytest.fixture(scope="module")
def library() -> Library:
    loaded = native.load()
    if loaded is None:
        pytest.skip("no C++ compiler here")
    return loaded


@pytest.fixture(scope="module", params=FORMS, ids=list(FORMS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    form, directory = FORMS[request.param], tmp_path_factory.mktemp("model")
    theirs = save(form, directory)
    shards = len(list(directory.glob("*.safetensors")))
    assert (shards > 1) == ("sharded" in request.param)
    return Pair(theirs, load_decoder(directory), directory)


def test_logits_of_two_requests_in_one_ragged_pass(pair: Pair) -> None:
    out = run_rows(pair.ours, Paged(pair.ours.kv), [(2, 0, A), (0, 0, B)])
    logits = pair.ours.logits(out.hidden_TH)
    assert logits.dtype == torch.float32
    assert_close(logits[: len(A)], states(pair.theirs, A)[0])
    assert_close(logits[len(A) :], states(pair.theirs, B)[0])


def test_logits_with_compiled_operators(pair: Pair, library: Library) -> None:
    ours = load_decoder(pair.directory, library=library)
    paged = Paged(ours.kv, library=library)
    outs = [run_rows(ours, paged, [(2, at, A[at : at + size])]) for at, size in ((0, 60), (60, 29), (89, 1))]
    logits = ours.logits(torch.cat([out.hidden_TH for out in outs]))
    assert_close(logits, states(pair.theirs, A)[0])


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
        assert_close(torch.cat(rows[slot]), states(pair.theirs, text)[0])


def test_greedy_text_of_64_tokens(pair: Pair) -> None:
    with torch.no_grad():
        theirs = pair.theirs.generate(torch.tensor([B]), do_sample=False, max_new_tokens=64)[0, len(B) :]
    assert theirs.unique().numel() > 5, "a text that repeats one token shows nothing"
    assert greedy(pair.ours, B, 64) == theirs.tolist()


def test_taps_are_the_streams_entering_the_layers(pair: Pair) -> None:
    _, streams, final = states(pair.theirs, A)
    assert len(streams) == pair.ours.config.num_layers + 1
    out = run_rows(pair.ours, Paged(pair.ours.kv), [(0, 0, A)], taps=(2, 0, 1), final=True)
    assert len(out.taps) == 4
    for mine, theirs in zip(out.taps, (streams[2], streams[0], streams[1], final), strict=True):
        assert_close(mine, theirs)
    assert_close(out.hidden_TH, final)
    assert not torch.allclose(streams[2], final, atol=1e-2), "before and after the final norm must differ"
