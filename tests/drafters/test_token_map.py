"""Tokens of two tokenizers matched by text, and a draft model whose tables are reordered to its target's ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models

from draftproof import LLM, SamplingParams, assets
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.text_model import TextDrafter
from draftproof.drafters.token_map import compare, token_texts
from draftproof.models.tokenizer_file import open_tokenizer
from tests.conformance.cases import DATA, prompts
from tests.drafters import golden
from tests.made.vocabularies import EMBED, lone_bytes, permuted, reduced, trained
from tests.slow import slow

SOURCE = DATA / "draft"
TINY = assets.path("tiny")


def drafting(model: Path, **options: Any) -> LLM:
    config = {"model": str(model), "num_speculative_tokens": 4, "policy": "fixed", **options}
    return LLM(dtype="float32", speculative_config=config)


def drafter(llm: LLM) -> Any:
    sandbox = llm.engine.runner.drafter
    assert sandbox is not None
    return sandbox.drafter


def numbers(llm: LLM, temperature: float) -> tuple[int, int]:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=32)
    llm.generate(prompts()[:6], params, use_tqdm=False)
    assert llm.stats.num_drafter_faults == 0
    return llm.stats.speculation.num_draft_tokens, llm.stats.speculation.num_accepted_tokens


@slow
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_other_ids_of_the_same_network_are_accepted_as_often(tmp_path: Path, temperature: float) -> None:
    expected = numbers(drafting(SOURCE), temperature)
    assert numbers(drafting(permuted(SOURCE, tmp_path)), temperature) == expected
    assert expected[1] > 50


@slow
def test_other_ids_of_the_same_network_have_the_references_acceptance(tmp_path: Path) -> None:
    first, second = (golden.acceptance(drafting(d), 4, 24) for d in (SOURCE, permuted(SOURCE, tmp_path)))
    assert first == second and first["tau_accepted"] > 1.5


@slow
def test_a_vocabulary_that_is_padded_further_is_the_same(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "draft")
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    tensors[EMBED] = torch.cat((tensors[EMBED], 9 * torch.ones_like(tensors[EMBED][:100])))
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    change_config(tmp_path / "draft", vocab_size=8292)
    assert numbers(drafting(tmp_path / "draft"), 0) == numbers(drafting(SOURCE), 0)


def test_only_tokens_of_both_are_drafted_and_the_rest_is_read_as_its_pieces(tmp_path: Path) -> None:
    folder = reduced(SOURCE, tmp_path, every=10)
    llm = drafting(folder)
    found = drafter(llm)
    assert isinstance(found, HeadDrafter)
    mapped = compare(open_tokenizer(TINY), open_tokenizer(folder), 8192, vocab_size(folder))
    common, missing = set((mapped.draft_V >= 0).nonzero()[:, 0].tolist()), set(mapped.pieces)
    assert len(common) == vocab_size(folder) and len(missing) == 8192 - len(common) > 1000
    drafted: list[int] = []
    for text in prompts():
        drafted += llm.draft(llm.tokenizer.encode(text), 4)
    assert len(set(drafted)) > 5 and set(drafted) <= common
    # a token that the draft has not
    token = next(i for i in sorted(missing) if len(mapped.pieces[i]) == 2)
    rows_VH = load_file(folder / "model.safetensors")[EMBED]
    expected_H = rows_VH[list(mapped.pieces[token])].float().mean(0).to(rows_VH.dtype).float()
    assert torch.equal(found.head._decoder.embed(torch.tensor([token]))[0], expected_H)  # type: ignore[attr-defined]
    assert numbers(llm, 0)[1] > 30


@slow
def test_the_tokenizer_that_the_user_names_is_the_targets(tmp_path: Path) -> None:
    """With that tokenizer the model's ids differ from its target's."""
    shutil.copytree(TINY, tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").unlink()
    config = {
        "model": str(permuted(SOURCE, tmp_path / "draft")),
        "num_speculative_tokens": 4,
        "policy": "fixed",
    }
    llm = LLM(str(tmp_path / "target"), tokenizer=str(TINY), dtype="float32", speculative_config=config)
    assert numbers(llm, 0) == numbers(drafting(SOURCE), 0)


@slow
def test_most_tokens_in_common_take_the_table_and_few_the_text(tmp_path: Path) -> None:
    kinds = {
        permuted(SOURCE, tmp_path / "permuted"): HeadDrafter,
        reduced(SOURCE, tmp_path / "reduced", every=20): HeadDrafter,
        trained(SOURCE, tmp_path / "trained", prompts(), 600): TextDrafter,
        lone_bytes(SOURCE, tmp_path / "bytes"): TextDrafter,
    }
    for folder, kind in kinds.items():
        assert isinstance(drafter(drafting(folder)), kind), folder
    assert isinstance(drafter(drafting(tmp_path / "trained", token_map="table")), HeadDrafter)
    assert isinstance(drafter(drafting(tmp_path / "permuted", token_map="text")), TextDrafter)


def test_pieces_bytes_and_special_tokens_are_told_by_their_text() -> None:
    """A sentencepiece-like tokenizer and a byte-level one spell the same tokens differently."""
    pieces: Any = Tokenizer(models.BPE({"\u2581the": 0, "<0x0A>": 1, "é": 2, "<0xC3>": 3, "q": 4}, []))
    pieces.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    letters: Any = Tokenizer(models.BPE({"Ġthe": 0, "q": 1, "Ã": 2, "Ċ": 3, "Ã©": 4, "\u2581": 5}, []))
    letters.decoder = decoders.ByteLevel()
    for tokenizer in (pieces, letters):
        tokenizer.add_special_tokens(["<|end|>"])
    assert token_texts(pieces) == {0: b" the", 1: b"\n", 2: "é".encode(), 3: b"\xc3", 4: b"q", 5: b"<|end|>"}
    mapped = compare(letters, pieces, 8, 6)  # 7 is padding of the model's vocabulary
    assert mapped.draft_V.tolist() == [0, 4, 3, 1, 2, -1, 5, -1]
    assert (mapped.num_tokens, mapped.num_common, list(mapped.pieces)) == (7, 6, [5])


def test_of_two_tokens_of_one_text_the_first_is_fed() -> None:
    twice: Any = Tokenizer(models.BPE({"b": 0, "<0x61>": 1, "a": 2}, []))
    once: Any = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    assert compare(once, twice, 2, 3).draft_V.tolist() == [1, 0]
    assert compare(once, twice, 2, 1).draft_V.tolist() == [-1, 0]  # ids beyond the model's are ignored


@slow
def test_an_untied_head_is_put_into_target_ids_too(tmp_path: Path) -> None:
    """A head with its own output matrix and a vocabulary with gaps gives the same drafts as a tied one."""
    folder = reduced(SOURCE, tmp_path / "tied", every=20)
    shutil.copytree(folder, tmp_path / "untied")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors[EMBED].clone()
    save_file(tensors, tmp_path / "untied" / "model.safetensors")
    change_config(tmp_path / "untied", tie_word_embeddings=False)
    assert numbers(drafting(tmp_path / "untied"), 0) == numbers(drafting(folder), 0)


def test_random_weights_need_no_translation(tmp_path: Path) -> None:
    folder = reduced(SOURCE, tmp_path, every=20)
    config = {"model": str(folder), "num_speculative_tokens": 3, "policy": "fixed"}
    llm = LLM(str(TINY), load_format="dummy", dtype="float32", speculative_config=config)
    llm.generate(["a b c"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert llm.stats.speculation.num_draft_tokens > 0 and llm.stats.num_drafter_faults == 0


def test_what_cannot_be_matched_is_refused_with_both_values(tmp_path: Path) -> None:
    bare = reduced(SOURCE, tmp_path / "bare", every=20)
    (bare / "tokenizer.json").unlink()
    size = vocab_size(bare)
    with pytest.raises(
        ValueError, match=f"vocab_size={size}, but the target's is 8192.*no tokenizer.json in .*bare;"
    ):
        drafting(bare)
    broken = permuted(SOURCE, tmp_path / "broken")
    (broken / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    with pytest.raises(ValueError, match=r"broken/tokenizer\.json: cannot be read"):
        drafting(broken)
    alien = lone_bytes(SOURCE, tmp_path / "alien")
    raw = json.loads((alien / "tokenizer.json").read_text())
    raw["model"]["vocab"] = {f"zz{i}": i for i in range(256)}
    (alien / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(
        ValueError, match="none of the target's 8192 tokens is one of the draft's 256; use token_map='text'"
    ):
        drafting(alien, token_map="table")
    with pytest.raises(ValueError, match="token_map='tabel': did you mean 'table'"):
        drafting(SOURCE, token_map="tabel")
    with pytest.raises(ValueError, match="did you mean 'token_map'"):
        drafting(SOURCE, tokenmap="text")


def vocab_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def change_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
