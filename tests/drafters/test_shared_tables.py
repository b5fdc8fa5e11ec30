"""A head without its own embedding or output matrix uses the target's in place, without a copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof import LLM
from draftproof.checkpoints.tensors import open_weights
from draftproof.drafters.head import HeadDrafter
from draftproof.schema import read_json
from tests.drafters.heads import ORACLE, Pair
from tests.made.derived import speculators_from_original

TABLES = ("embed_tokens.weight", "lm_head.weight")
HEADS = {
    "eagle3": "target_llama",
    "peagle": "target_llama",
    "dflash": "target_qwen3",
    "dspark": "target_qwen3",
    "dspark_gated_a": "target_spec_qwen3_a",
    "dflash2": "target_qwen3",
    "xpress_a": "target_spec_qwen3_a",
    "zlab_dflash_a": "target_dflash_a",
    "mtp": "target_qwen3",
    "safeailab_eagle1_a": "target_eagle_a",
}
NATIVE = ["mtp_mimo_a", "mtp_glm4_moe_a", "mtp_deepseek_v3_a", "mtp_deepseek_v3_2layer_a"]
REDUCED = ["eagle3", "peagle", "dflash", "dspark"]  # those of HEADS that have fewer tokens
WHOLE = [folder for folder in HEADS if folder != "dspark"]  # its bias has fewer rows


def rewritten(folder: str, to: Path, *, own: bool, reduced: bool = False) -> str:
    """The head with copies of the target's tables in its file, or without any (`own`). `reduced`: with its own smaller
    vocabulary, else with the target's. P-EAGLE always has its own embedding."""
    source = ORACLE / folder
    if folder == "safeailab_eagle1_a":
        source = speculators_from_original(source, to / "safetensors")
    target, raw = open_weights(ORACLE / HEADS[folder]), read_json(source / "config.json")
    tensors = load_file(source / "model.safetensors")
    kept = {"embed_tokens.weight": tensors["embed_tokens.weight"]} if folder == "peagle" else {}
    dropped = TABLES if reduced else (*TABLES, "d2t", "t2d")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    if not reduced and "draft_vocab_size" in raw:
        raw["draft_vocab_size"] = raw["transformer_layer_config"]["vocab_size"]
    if own:
        head = target.get("lm_head.weight")
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"])) if reduced else slice(None)
        tensors |= {
            "embed_tokens.weight": target.get("model.embed_tokens.weight"),
            "lm_head.weight": head[ids],
        }
    (to / "head").mkdir(parents=True)
    (to / "head" / "config.json").write_text(json.dumps(raw))
    save_file(
        {n: t.contiguous().clone() for n, t in (tensors | kept).items()}, to / "head" / "model.safetensors"
    )
    return str(to / "head")


def tables(pair: Pair) -> tuple[Tensor, Any]:
    """(embedding, the product that makes logits) of a drafter."""
    network: Any = pair.head if isinstance(pair.drafter, HeadDrafter) else pair.drafter
    network = getattr(network, "_network", network)
    return network._embed_VH, network._head


def logits(pair: Pair) -> Tensor:
    made: Tensor = tables(pair)[1](
        torch.randn(3, pair.target.config.hidden_size, generator=torch.manual_seed(0))
    )
    return made


def is_shared(pair: Pair) -> tuple[bool, bool]:
    embed_VH, head = tables(pair)
    return embed_VH.data_ptr() == pair.target.embed_VH.data_ptr(), head is pair.target.head


@pytest.mark.parametrize("folder", WHOLE)
def test_a_head_of_every_method_reads_the_targets_tables(tmp_path: Path, folder: str) -> None:
    shared = Pair(rewritten(folder, tmp_path / "shared", own=False), HEADS[folder], ORACLE / folder, 3)
    own = Pair(rewritten(folder, tmp_path / "own", own=True), HEADS[folder], ORACLE / folder, 3)
    trained = folder == "peagle"
    assert is_shared(shared) == (not trained, True)
    assert is_shared(own) == (False, False)
    num_tables = 1 if trained else 2
    assert own.num_bytes - shared.num_bytes == num_tables * shared.target.embed_VH.nbytes
    assert torch.equal(tables(own)[0], tables(shared)[0])
    assert torch.allclose(logits(own), logits(shared), atol=1e-5)


@pytest.mark.parametrize("folder", REDUCED)
def test_a_reduced_vocabulary_takes_the_rows_it_has_and_no_more(tmp_path: Path, folder: str) -> None:
    shared, own = (
        Pair(rewritten(folder, tmp_path / str(own), own=own, reduced=True), HEADS[folder], ORACLE / folder, 3)
        for own in (False, True)
    )
    assert is_shared(shared) == (folder != "peagle", False)
    saved = 0 if folder == "peagle" else shared.target.embed_VH.nbytes
    assert own.num_bytes - shared.num_bytes == saved
    assert torch.equal(logits(own), logits(shared))


@pytest.mark.parametrize("folder", NATIVE)
def test_modules_in_the_targets_files_read_its_tables(folder: str) -> None:
    pair = Pair(folder, folder, ORACLE / folder, num_drafts=2)
    assert is_shared(pair) == (True, True)


def test_an_assistant_embeds_with_the_targets_table() -> None:
    """Its output matrix has another size, so it is its own."""
    pair = Pair("gemma4_assistant_a", "target_gemma4_a", num_drafts=3)
    network: Any = pair.head
    assert network._embed == pair.target.embed and network._head is not pair.target.head
    stored = open_weights(ORACLE / "gemma4_assistant_a")
    assert pair.num_bytes == 4 * sum(stored.get(name).numel() for name in stored.names())


def test_a_tied_target_lends_the_table_that_it_makes_logits_with() -> None:
    """In an engine, where the table has the layout of the machine's fastest product; memory counts it once."""
    head = Path(__file__).parent.parent / "data" / "tiny-mtp"
    llm = LLM(speculative_config={"model": str(head)})
    target, sandbox = llm.engine.runner.target, llm.engine.runner.drafter
    assert target.config.tie_word_embeddings
    assert sandbox is not None and isinstance(sandbox.drafter, HeadDrafter)
    network: Any = sandbox.drafter.head
    assert network._embed_VH.data_ptr() == target.embed_VH.data_ptr()
    assert network._head is target.head
    stored = open_weights(head)
    numbers = sum(stored.get(name).numel() for name in stored.names() if not name.startswith("verifier_"))
    whole = numbers * target.embed_VH.element_size()
    assert 0.7 * whole < llm.memory.draft_weights <= whole  # products may hold bf16 in 12.1 bits
    assert llm.memory.draft_weights + 0.7 * target.embed_VH.nbytes > whole, "a second table would not show"


@pytest.mark.parametrize("setting", ["dtype", "fp8"])
def test_a_head_of_another_precision_has_copies(setting: str) -> None:
    changed: dict[str, Any] = {"dtype": torch.bfloat16} if setting == "dtype" else {"fp8": True}
    pair = Pair("mtp", "target_qwen3", num_drafts=3, **changed)
    assert is_shared(pair) == (setting == "fp8", False)
    embed_VH, head = tables(pair)
    assert embed_VH.dtype == changed.get("dtype", torch.float32)
    states = torch.randn(2, 64, dtype=embed_VH.dtype)
    assert head(states).dtype == torch.float32 and head(states).shape == (2, 256)
