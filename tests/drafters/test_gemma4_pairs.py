"""Which assistants fit a target: wrong pairs are refused at start, naming both values; and assistants in chains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof import LLM, SamplingParams
from draftproof.bench.compare import compare
from draftproof.drafters.base import DraftSpec, Proposal, Verified
from draftproof.drafters.recordings import save as save_recordings
from tests.made.shared import gemma4, gemma4_assistant, gemma4_centroids, prompts

Edit = Callable[[dict[str, Any]], None]


def changed(
    source: str, folder: Path, edit: Edit | None = None, drop: str = "", **tensors: torch.Tensor
) -> str:
    """A copy of a checkpoint with its config edited, without tensors named `drop`, and with `tensors` replaced."""
    shutil.copytree(source, folder)
    raw = json.loads((folder / "config.json").read_text())
    if edit is not None:
        edit(raw)
    (folder / "config.json").write_text(json.dumps(raw))
    kept = {k: v for k, v in load_file(folder / "model.safetensors").items() if not drop or drop not in k}
    save_file({**kept, **{k.replace("__", "."): v for k, v in tensors.items()}}, folder / "model.safetensors")
    return str(folder)


def text(**changes: Any) -> Edit:
    return lambda raw: raw["text_config"].update(changes)


def outer(**changes: Any) -> Edit:
    return lambda raw: raw.update(changes)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (outer(backbone_hidden_size=80), r"backbone_hidden_size=80, but the target's is 64"),
        (text(vocab_size=300), r"vocab_size=300, but the target's is 8192"),
        (text(global_head_dim=64), r"full_attention: head_dim=64, but the target's is 32"),
        (text(num_key_value_heads=1), r"sliding_attention: num_kv_heads=1, but the target's is 2"),
        (
            text(rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}),
            r"sliding_attention: rope=.*theta=7.0.*target's is .*theta=10000.0",
        ),
        (text(num_kv_shared_layers=2), r"num_kv_shared_layers=2, but num_hidden_layers=4"),
        (text(hidden_size_per_layer_input=8), r"hidden_size_per_layer_input=8: must be 0"),
        (text(enable_moe_block=True), r"enable_moe_block=True: must be false in an assistant"),
        (text(intermediate_size=100), r"gate_proj.weight' has shape \[96, 64\].*\[100, 64\]"),
        (text(attention_bias=True), r"q_proj.bias' is missing"),
        (text(warp=1), r"unknown key 'warp'=1"),
    ],
)
def test_an_assistant_of_another_target_is_refused_with_both_values(
    tmp_path: Path, edit: Edit, message: str
) -> None:
    assistant = changed(gemma4_assistant(), tmp_path / "assistant", edit)
    with pytest.raises(ValueError, match=message):
        LLM(gemma4(), speculative_config={"model": assistant})


def test_a_target_of_another_family_is_refused_with_both_types() -> None:
    with pytest.raises(ValueError, match=r"'gemma4_assistant', but the target's is 'qwen3'"):
        LLM(speculative_config={"model": gemma4_assistant()})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (outer(num_centroids=7), r"num_centroids=7, .*vocab_size=8192"),
        (outer(centroid_intermediate_top_k=17), r"num_centroids=16, centroid_intermediate_top_k=17"),
        (outer(use_ordered_embeddings=False), r"2 tensors have no place.*masked_embedding"),
    ],
)
def test_centroids_that_do_not_fit_are_refused(tmp_path: Path, edit: Edit, message: str) -> None:
    assistant = changed(gemma4_centroids(), tmp_path / "assistant", edit)
    with pytest.raises(ValueError, match=message):
        LLM(gemma4(), speculative_config={"model": assistant})


def test_an_order_that_names_a_token_twice_is_refused(tmp_path: Path) -> None:
    order = torch.arange(8192)
    order[0] = 1
    assistant = changed(gemma4_centroids(), tmp_path / "assistant", masked_embedding__token_ordering=order)
    with pytest.raises(ValueError, match=r"token_ordering must name each of 8192 tokens once"):
        LLM(gemma4(), speculative_config={"model": assistant})


def test_an_assistant_alone_is_no_model() -> None:
    with pytest.raises(ValueError, match=r"is a draft head that does not name its target"):
        LLM(gemma4_assistant())
    with pytest.raises(ValueError, match=r"method='eagle3', but .* is a checkpoint for 'gemma4_mtp'"):
        LLM(gemma4(), speculative_config={"method": "eagle3", "model": gemma4_assistant()})


def test_a_file_that_does_not_say_that_layers_share_means_the_same(tmp_path: Path) -> None:
    silent = changed(gemma4_assistant(), tmp_path / "assistant", text(num_kv_shared_layers=0))
    tokens = LLM(gemma4()).tokenizer.encode(prompts()[0])
    found = [
        LLM(gemma4(), dtype="float32", speculative_config={"model": model}).draft(tokens, 4)
        for model in (gemma4_assistant(), silent)
    ]
    assert found[0] == found[1]


class Borrows:
    """A user's drafter that asks for the target's caches."""

    spec = DraftSpec(borrow=(0,))

    def __init__(self, config: object) -> None:
        pass

    def propose(self, verified: object, num_drafts: int) -> None:
        raise AssertionError("never asked")


class Repeats:
    """A user's drafter that repeats the next token, for every other request."""

    spec = DraftSpec()

    def __init__(self, config: object) -> None:
        pass

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        tokens_RK = verified.next_R[:, None].repeat(1, num_drafts)
        return Proposal(tokens_RK, verified.k_R * (verified.slots_R % 2))


def test_a_users_drafter_is_not_lent_the_targets_caches() -> None:
    with pytest.raises(ValueError, match=r"spec.borrow=\(0,\): .*methods of this package only"):
        LLM(gemma4(), speculative_config={"method": f"{__name__}.Borrows"})


NGRAM = {"method": "ngram", "prompt_lookup_min": 3}


def assistant() -> dict[str, Any]:
    return {"model": gemma4_assistant()}


def chain(*members: dict[str, Any]) -> dict[str, Any]:
    return {"method": "chain", "drafters": list(members)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: chain(NGRAM, {"model": gemma4_centroids()}, {"model": gemma4()}, assistant()),
        lambda: chain({"method": f"{__name__}.Repeats"}, assistant()),
        lambda: {"model": gemma4()},
    ],
    ids=["a chain with two assistants and a model", "behind a user's drafter", "a gemma as draft model"],
)
def test_among_other_drafters_output_is_that_of_plain_decoding(make: Callable[[], dict[str, Any]]) -> None:
    params = [SamplingParams(temperature=t, seed=2, max_tokens=24, logprobs=1) for t in (0, 0.7, 0)]
    plain = LLM(gemma4(), dtype="float32").generate(prompts()[:3], params, use_tqdm=False)
    speculative = {**make(), "num_speculative_tokens": 4, "policy": "fixed"}
    llm = LLM(gemma4(), dtype="float32", speculative_config=speculative)
    outputs = llm.generate(prompts()[:3], params, use_tqdm=False)
    assert not compare(plain, outputs)
    assert llm.stats.speculation.num_accepted_tokens > 10 and llm.stats.num_drafter_faults == 0


def test_members_of_a_chain_read_their_own_caches() -> None:
    """An assistant after a model with caches of its own drafts what it drafts alone."""
    tokens = LLM(gemma4()).tokenizer.encode(prompts()[0])
    never = {"method": "ngram", "prompt_lookup_min": 60, "prompt_lookup_max": 64}
    chained = chain(never, assistant(), {"model": gemma4()})
    found = [
        LLM(gemma4(), dtype="float32", speculative_config={**config, "num_speculative_tokens": 4}).draft(
            tokens, 4
        )
        for config in (assistant(), chained)
    ]
    assert len(found[0]) == 4 and found[0] == found[1]


def test_replay_runs_an_assistant(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    plain = LLM(gemma4(), dtype="float32").generate(prompts()[:3], params, use_tqdm=False)
    save_recordings(tmp_path / "recordings.json", plain)
    config = {"method": "replay", "recordings": str(tmp_path / "recordings.json"), "drafters": [assistant()]}
    speculative = {**config, "num_speculative_tokens": 4, "policy": "fixed"}
    llm = LLM(gemma4(), dtype="float32", speculative_config=speculative)
    outputs = llm.generate(prompts()[:3], params, use_tqdm=False)
    assert not compare(plain, outputs)
    speculation = llm.stats.speculation
    assert speculation.num_accepted_tokens == speculation.num_draft_tokens > 40
    assert llm.stats.num_drafter_faults == 0


@pytest.mark.parametrize("make", [gemma4_assistant, gemma4_centroids], ids=["assistant", "centroids"])
def test_random_weights_do_for_a_pair_without_files(make: Callable[[], str]) -> None:
    config = {"model": make(), "num_speculative_tokens": 3, "policy": "fixed"}
    llm = LLM(gemma4(), load_format="dummy", speculative_config=config)
    llm.generate(prompts()[0], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert llm.stats.speculation.num_draft_tokens > 0 and llm.stats.num_drafter_faults == 0
