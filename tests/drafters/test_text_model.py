"""A draft model that reads and writes text: conversion between tokenizers, its own cache, the end of its context."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from draftproof import LLM, SamplingParams, assets
from draftproof.attention.base import PagedAttention
from draftproof.drafters.retokenize import DraftIds, TargetText
from draftproof.models.decoder import Decoder, TargetOutput
from draftproof.models.tokenizer_file import BROKEN, open_tokenizer
from tests.drafters.test_token_map import change_config, drafter, drafting, numbers
from tests.made.shared import DATA, other_tokens, prompts
from tests.made.vocabularies import lone_bytes, permuted, trained
from tests.slow import slow

SOURCE = DATA / "draft"
TINY = assets.path("tiny")
TEXTS = [*prompts(), "naïve café — “quoted” 你好, мир! 🙂🙃 \n\n\n    x\t\t= {1:   2}\r\n<|im_end|>é"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "tiny": open_tokenizer(TINY),
        "trained": open_tokenizer(trained(SOURCE, folder / "trained", prompts(), 500)),
        "bytes": open_tokenizer(lone_bytes(SOURCE, folder / "bytes")),
        "pieces": pieces(),
    }


def pieces() -> Any:
    """A sentencepiece-like tokenizer: a space is put before any text, and unknown characters are bytes."""
    words = [
        "\u2581",
        "\u2581t",
        "h",
        "e",
        "\u2581th",
        "\u2581the",
        "t",
        "a",
        "n",
        "an",
        "o",
        "r",
        "or",
        "<s>",
    ]
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("a", "n"), ("o", "r")]
    tokenizer: Any = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    parts = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 269)])
    return tokenizer


@pytest.mark.parametrize("name", ["tiny", "trained", "bytes", "pieces"])
@pytest.mark.parametrize("seed", range(3))
def test_text_that_grows_is_encoded_as_the_whole_would_be(
    tokenizers: dict[str, Any], name: str, seed: int
) -> None:
    draw, tokenizer = random.Random(seed), tokenizers[name]
    for text in TEXTS:
        ids, at = DraftIds(tokenizer), 0
        while at < len(text):
            at += draw.randrange(1, 12)
            ids.update(text[:at])
            assert ids.ids == tokenizer.encode(text[:at]).ids, text[:at]


def test_only_the_end_of_a_text_is_encoded_again(tokenizers: dict[str, Any]) -> None:
    class Counting:
        num_characters = 0

        def encode(self, text: str, add_special_tokens: bool) -> Any:
            self.num_characters += len(text)
            return tokenizers["tiny"].encode(text, add_special_tokens=add_special_tokens)

    counting = Counting()
    text = "".join(TEXTS) * 4
    ids = DraftIds(counting)
    for at in range(7, len(text), 7):
        ids.update(text[:at])
    assert counting.num_characters < len(text) / 7 * 200


@pytest.mark.parametrize("name", ["tiny", "bytes", "pieces"])
@pytest.mark.parametrize("seed", range(3))
def test_ids_that_come_in_rounds_give_the_text_of_all(
    tokenizers: dict[str, Any], name: str, seed: int
) -> None:
    """The text is complete up to the last whole character."""
    draw, tokenizer = random.Random(seed), tokenizers[name]
    for text in TEXTS:
        ids, known, at = (
            tokenizer.encode(text, add_special_tokens=False).ids,
            TargetText(tokenizer, frozenset()),
            0,
        )
        broken = 0
        while at < len(ids):
            step = draw.randrange(1, 5)
            known.add(ids[at : at + step])
            at += step
            whole = tokenizer.decode(ids[:at], skip_special_tokens=False)
            broken += not known.ends_whole
            if name == "pieces" and BROKEN in whole:
                continue  # it drops an incomplete run of bytes
            assert known.text == whole.rstrip(BROKEN)
            assert known.ends_whole == (known.text == whole)
        assert known.num_ids == len(ids) and (broken > 0 or text.isascii() or name == "tiny")
        assert text.startswith(known.text) or name == "pieces"


def test_what_is_written_comes_back_as_the_targets_own_tokens(tokenizers: dict[str, Any]) -> None:
    tiny = tokenizers["tiny"]
    checked = 0
    for text in prompts():
        ids = tiny.encode(text).ids
        for split in range(1, len(ids) - 6):
            known = TargetText(tiny, frozenset())
            known.add(ids[:split])
            new = tiny.decode(ids[split : split + 6])
            if known.ends_whole and tiny.encode(known.text + new).ids == ids[: split + 6]:
                assert known.continued(new, 4) == ids[split : split + 4]
                checked += 1
    assert checked > 50


def test_a_word_that_was_begun_is_continued_and_not_written_anew(tokenizers: dict[str, Any]) -> None:
    """`retu` was emitted in tokens that encoding would not choose; the draft begins where it ends."""
    tiny = tokenizers["tiny"]
    known = TargetText(tiny, frozenset())
    start = [i for c in "    re" for i in tiny.encode(c).ids]
    known.add(start)
    found = known.continued("turn x", 8)
    assert tiny.decode([*start, *found]) == "    return x" and len(found) > 1
    assert known.continued("turn x", 1) == found[:1]


def test_special_tokens_that_the_draft_has_not_are_not_read(tokenizers: dict[str, Any]) -> None:
    tiny, end = tokenizers["tiny"], 2
    known = TargetText(tiny, frozenset([end]))
    known.add([*tiny.encode("one").ids, end, *tiny.encode(" two").ids])
    assert known.text == "one two" and known.num_ids == len(tiny.encode("one").ids) + 1 + len(
        tiny.encode(" two").ids
    )
    llm = drafting(Path(other_tokens()))
    assert drafter(llm)._unknown == frozenset(range(5)) and not drafter(llm)._foreign


def test_what_a_tokenizer_puts_before_a_text_is_read_once(tokenizers: dict[str, Any]) -> None:
    ids = DraftIds(tokenizers["pieces"])
    ids.update("the or")
    assert ids.ids[0] == 269 and ids.ids == tokenizers["pieces"].encode("the or").ids
    ids = DraftIds(tokenizers["pieces"])
    ids.update("<s>the")
    assert ids.ids.count(269) == 1


@slow
def test_the_same_tokenizer_is_accepted_as_often_through_its_text(tmp_path: Path) -> None:
    """Greedy text is converted there and back without loss, whatever the token ids."""
    expected = numbers(drafting(SOURCE), 0)
    assert numbers(drafting(permuted(SOURCE, tmp_path), token_map="text"), 0) == expected
    assert expected[1] > 50


def after_each_draft_pass(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, look: Callable[[torch.Tensor, PagedAttention], None]
) -> None:
    """Call `look` with the output of each of the draft model's own passes; it may raise."""
    original, target = Decoder.__call__, llm.engine.runner.target

    def called(self: Decoder, tokens_N: torch.Tensor, attn: PagedAttention, *rest: Any) -> TargetOutput:
        out = original(self, tokens_N, attn, *rest)
        if self is not target:
            look(tokens_N, attn)
        return out

    monkeypatch.setattr(Decoder, "__call__", called)


@slow
def test_a_round_computes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting(Path(other_tokens()))
    num_rows: list[int] = []
    after_each_draft_pass(monkeypatch, llm, lambda tokens_N, attn: num_rows.append(len(tokens_N)))
    prompt = "".join(prompts())
    output = llm.generate(
        prompt, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True), use_tqdm=False
    )[0]
    text = prompt + output.outputs[0].text
    num_tokens = len(open_tokenizer(Path(other_tokens())).encode(text).ids)
    singles, (first, second, *later) = num_rows.count(1), [n for n in num_rows if n > 1]
    assert first == 2048 and second > 100  # the prompt, in one pass as large as the engine's
    assert 20 < sum(later) < 150 and sum(num_rows) - singles < num_tokens + 100
    assert singles > 48


def test_of_a_text_longer_than_the_models_context_the_end_is_read(tmp_path: Path) -> None:
    folder = trained(SOURCE, tmp_path, prompts(), 800)
    change_config(folder, max_position_embeddings=64)
    llm, plain = drafting(folder), LLM(dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=160, ignore_eos=True)
    text = prompts()[0]
    found, expected = (one.generate(text, params, use_tqdm=False)[0].outputs[0] for one in (llm, plain))
    assert found.token_ids == expected.token_ids
    assert llm.stats.num_drafter_faults == 0
    late = llm.tokenizer.encode(text + found.text[: len(found.text) * 3 // 4])
    assert len(open_tokenizer(folder).encode(text + found.text).ids) > 4 * 64
    assert llm.draft(late, 4) and llm.stats.num_drafter_faults == 0
    assert llm.stats.speculation.num_accepted_tokens > 10


def test_without_room_a_request_is_decoded_plainly_until_there_is_some() -> None:
    llm = drafting(Path(other_tokens()))
    params = SamplingParams(temperature=0, max_tokens=24)
    pages = drafter(llm)._pages
    taken = pages.allocate(pages.num_free - 2)
    first = llm.generate(prompts()[:3], params, use_tqdm=False)
    before = llm.stats.speculation.num_draft_tokens
    pages.release(taken)
    second = llm.generate(prompts()[:3], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]
    assert before < llm.stats.speculation.num_draft_tokens / 4
    assert pages.num_free == pages.num_blocks - 1 and llm.stats.num_drafter_faults == 0


@slow
def test_a_chain_may_have_it_beside_others() -> None:
    """The model's own cache does not interfere with the other member's pages."""
    members = [{"method": "ngram", "prompt_lookup_min": 4}, {"model": other_tokens()}, {"model": str(SOURCE)}]
    config = {"method": "chain", "drafters": members, "num_speculative_tokens": 4, "policy": "fixed"}
    params = SamplingParams(temperature=0, max_tokens=32)
    llm = LLM(dtype="float32", speculative_config=config)
    found, expected = (
        one.generate(prompts()[:4], params, use_tqdm=False) for one in (llm, LLM(dtype="float32"))
    )
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert llm.stats.num_drafter_faults == 0 and llm.stats.speculation.num_accepted_tokens > 20


def test_a_pass_that_failed_leaves_nothing_that_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting(Path(other_tokens()))
    params = SamplingParams(temperature=0, max_tokens=32)
    clean = llm.generate(prompts()[:3], params, use_tqdm=False)
    before = llm.stats.speculation.num_accepted_tokens
    calls, believed = list[int](), list[bool]()

    def fails_once(tokens_N: torch.Tensor, attn: PagedAttention) -> None:
        calls.append(1)
        if len(calls) != 9:
            return
        table_SB, layer = attn.cache.block_table_SB, attn.cache.layers[0]
        size = layer.k.shape[2]
        for slot, position in zip(attn.rows.slots_T.tolist(), attn.rows.positions_T.tolist(), strict=True):
            if position >= 0:
                layer.k[table_SB[slot, position // size], :, position % size] = 3.0
        requests = drafter(llm)._requests.values()  # asserted below: here it would count as a fault
        believed.extend(len(request.cached) >= len(request.draft.ids) for request in requests)
        raise RuntimeError("once")

    after_each_draft_pass(monkeypatch, llm, fails_once)
    again = llm.generate(prompts()[:3], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in clean] == [o.outputs[0].token_ids for o in again]
    assert believed == [False] * 3, "what a pass overwrites is not believed before it is through"
    assert llm.stats.num_drafter_faults == 1 and len(calls) > 20
    assert llm.stats.speculation.num_accepted_tokens - before > before / 2


def test_a_draft_ends_before_a_special_token_that_the_target_has_not(tmp_path: Path) -> None:
    """The model has its target's tokens under other ids; one that it often writes is declared special."""
    folder = permuted(SOURCE, tmp_path)
    llm = drafting(folder, token_map="text")
    expected = llm.draft(llm.tokenizer.encode("for i in range("), 4)
    third = open_tokenizer(folder).encode(llm.tokenizer.decode(expected)).ids[2]
    raw = json.loads((folder / "tokenizer.json").read_text())
    assert third not in drafter(llm)._foreign and raw["model"]["vocab"]
    drafter(llm)._foreign = frozenset([third])
    assert llm.draft(llm.tokenizer.encode("for i in range("), 4) == expected[:2]
