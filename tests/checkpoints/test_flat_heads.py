"""Heads with a flat config, as their trainers publish them: P-EAGLE, EAGLE-3 of one state, heads without lm_head."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof import LLM
from draftproof.checkpoints import detect
from draftproof.drafters.tapped import TappedSettings
from draftproof.schema import read_json
from tests.checkpoints.test_detect import copied
from tests.drafters.heads import ORACLE, Pair, close
from tests.made.derived import flat_from_speculators

PEAGLE = ORACLE / "peagle"
FORMS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {  # keys, and the shape of mask_hidden
    "its own name": ({"architectures": ["PeagleLlamaForCausalLM"], "pard_token": 255}, (1, 192)),
    "EAGLE-3's name": ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 255}, (1, 1, 192)),
    "the trainer's name": ({"architectures": ["PEagleDraftModel"], "mask_token_id": 255}, (192,)),
    "no name": ({"pard_token": 255, "norm_before_residual": None}, (1, 192)),
}


def flat(folder: Path, form: str, **keys: Any) -> Path:
    given, shape = FORMS[form]
    mask = load_file(PEAGLE / "model.safetensors")["mask_hidden"].view(shape)
    return flat_from_speculators(PEAGLE, folder, {**given, **keys}, {"mask_hidden": mask})


def rows(pair: Pair) -> Tensor:
    """Logits of a prompt's rows and three mask rows behind them."""
    features, mask, num = pair.head.features(pair.taps()), pair.head.layout.mask_token, 12
    assert features is not None and mask == 255
    tokens = [*pair.tokens[1 : num + 1], mask, mask, mask]
    kept = [*range(num), *[len(pair.tokens)] * 3]
    hidden, _ = pair.run(pair.memory(), tokens, features[kept], list(range(num + 3)), [0] * (num + 3))
    return pair.head.logits(hidden)


@pytest.mark.parametrize("form", FORMS)
def test_a_flat_p_eagle_is_the_head_of_the_other_format(tmp_path: Path, form: str) -> None:
    head = flat(tmp_path / "head", form)
    assert detect.read(head).method == "peagle" and detect.is_draft_head(head)
    theirs, ours = (Pair(str(folder), "target_llama", PEAGLE) for folder in (PEAGLE, head))
    assert torch.equal(rows(ours), rows(theirs))


@pytest.mark.parametrize("form", FORMS)
def test_a_flat_p_eagle_drafts_what_the_other_format_drafts(tmp_path: Path, form: str) -> None:
    drafts = []
    for folder in (PEAGLE, flat(tmp_path / "head", form)):
        llm = LLM(
            str(ORACLE / "target_llama"),
            speculative_config={"model": str(folder), "num_speculative_tokens": 5},
            dtype="float32",
            max_model_len=64,
        )
        drafts.append([llm.draft([3, 7, 11, token], 5) for token in range(20, 30)])
    assert drafts[0] == drafts[1] and len({tuple(d) for d in drafts[0]}) > 3


def test_a_flat_p_eagle_is_what_eagle3_with_parallel_drafting_asks_for(tmp_path: Path) -> None:
    """vLLM's way to name it; a head of the same form without masks drafts one token after another."""
    asked = {"method": "eagle3", "parallel_drafting": True, "num_speculative_tokens": 5}
    target, head = str(ORACLE / "target_llama"), str(flat(tmp_path / "head", "EAGLE-3's name"))
    llm, plain = (
        LLM(target, dtype="float32", max_model_len=64, speculative_config=given)
        for given in ({**asked, "model": head}, {"model": head, "num_speculative_tokens": 5})
    )
    drafts = llm.draft([3, 7, 11, 20], 5)
    assert len(drafts) == 5 and drafts == plain.draft([3, 7, 11, 20], 5)
    serial = {**asked, "model": str(ORACLE / "safeailab_eagle3_a")}
    with pytest.raises(ValueError, match="method='eagle3' drafts one token after another"):
        LLM(str(ORACLE / "target_eagle_a"), speculative_config=serial)


def test_a_flat_p_eagle_says_what_its_residual_is(tmp_path: Path) -> None:
    """Other drafts by the other convention of residual: those of the other format, and not what they were before."""
    raw = {**read_json(PEAGLE / "config.json"), "norm_before_residual": True}
    (tmp_path / "normed").mkdir()
    (tmp_path / "normed" / "config.json").write_text(json.dumps(raw))
    save_file(load_file(PEAGLE / "model.safetensors"), tmp_path / "normed" / "model.safetensors")
    head = flat(tmp_path / "head", "its own name", norm_before_residual=True)
    ours, theirs = (Pair(str(f), "target_llama", PEAGLE) for f in (head, tmp_path / "normed"))
    assert torch.equal(rows(ours), rows(theirs))
    assert (rows(ours) - rows(Pair("peagle", "target_llama"))).abs().max() > 0.1


@pytest.mark.parametrize(
    ("keys", "dropped", "message"),
    [
        ({"pard_token": None}, "", "mask_token_id is missing"),
        ({"pard_token": "255"}, "", "pard_token='255': must be an integer"),
        ({}, "mask_hidden", "'mask_hidden' is missing"),
        ({}, "embed_tokens.weight", "embed_tokens.weight is missing.*embedding of its own"),
    ],
)
def test_an_incomplete_p_eagle_is_refused(
    tmp_path: Path, keys: dict[str, Any], dropped: str, message: str
) -> None:
    head = flat(tmp_path / "head", "its own name", **keys)
    tensors = load_file(head / "model.safetensors")
    tensors.pop(dropped, None)
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        Pair(str(head), "target_llama", PEAGLE)


def one_state(folder: Path) -> Path:
    """SafeAILab's EAGLE-3 head without its fusion, reading the target's last state."""
    head = copied("safeailab_eagle3_a", folder, eagle_config={"use_aux_hidden_state": False})
    tensors = load_file(head / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, head / "model.safetensors")
    return head


@pytest.mark.parametrize("prefix", [1, 5, 16])
def test_eagle3_of_one_state_computes_the_reference_layer_on_it(tmp_path: Path, prefix: int) -> None:
    """The layer is that of the head with fusion, which is compared with the original's numbers elsewhere; the state is
    the reference's own, after the final norm."""
    source, state = ORACLE / "safeailab_eagle3_a", ORACLE / "safeailab_eagle1_a"
    ours, fused = Pair(str(one_state(tmp_path)), "target_eagle_a", state), Pair(source.name, "target_eagle_a")
    assert ours.drafter.spec.taps.layers == () and ours.drafter.spec.taps.final
    x, expected = ours.tokens, ours.io["last_postnorm_raw"]
    features = ours.head.features(ours.taps())
    assert features is not None
    close(features, expected, 1e-5)
    found = []
    for pair, states in ((ours, features), (fused, expected)):
        paged, own = pair.memory(), []
        hidden, feedback = pair.run(
            paged, x[1 : prefix + 1], states[:prefix], list(range(prefix)), [0] * prefix
        )
        own.append(pair.head.logits(hidden[-1:]))
        for step in range(2):
            assert feedback is not None
            hidden, feedback = pair.run(paged, [x[prefix + 1 + step]], feedback[-1:], [prefix + step], [0])
            own.append(pair.head.logits(hidden))
        found.append(torch.cat(own))
    close(found[0], found[1])
    # what a state from before the norm would give
    wrong, _ = ours.run(
        ours.memory(),
        x[1 : prefix + 1],
        ours.io["last_prenorm_raw"][:prefix],
        list(range(prefix)),
        [0] * prefix,
    )
    assert (ours.head.logits(wrong[-1:]) - found[0][:1]).abs().max() > 0.01


def test_eagle3_of_one_state_drafts_in_an_engine_what_its_head_says(tmp_path: Path) -> None:
    head = one_state(tmp_path)
    pair = Pair(str(head), "target_eagle_a", ORACLE / "safeailab_eagle1_a")
    llm = LLM(
        str(ORACLE / "target_eagle_a"),
        speculative_config={"model": str(head), "num_speculative_tokens": 4},
        dtype="float32",
        max_model_len=64,
    )
    features, x, num = pair.head.features(pair.taps()), pair.tokens, 9
    assert features is not None and pair.head.ids_V is not None
    paged, drafts = pair.memory(), list[int]()
    hidden, feedback = pair.run(paged, x[1 : num + 1], features[:num], list(range(num)), [0] * num)
    for step in range(4):
        drafts.append(int(pair.head.ids_V[pair.head.logits(hidden[-1:]).argmax()]))
        assert feedback is not None
        hidden, feedback = pair.run(paged, drafts[-1:], feedback[-1:], [num + step], [0])
    assert llm.draft(x[:num], 4, next_token=x[num]) == drafts


def test_a_head_without_fusion_is_as_wide_as_its_target(tmp_path: Path) -> None:
    """Even where it has tables of its own: no product takes one width to the other."""
    head = one_state(tmp_path)
    tensors = load_file(head / "model.safetensors") | {"embed_tokens.weight": torch.zeros(256, 128)}
    save_file(tensors, head / "model.safetensors")
    raw = {**read_json(head / "config.json"), "hidden_size": 128}
    (head / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="hidden_size=128, but the target's is 64"):
        Pair(str(head), "target_eagle_a", ORACLE / "safeailab_eagle1_a")


def without_output_matrix(folder: Path, vocab: int) -> Path:
    head = copied("safeailab_eagle3_a", folder, draft_vocab_size=vocab)
    tensors = load_file(head / "model.safetensors")
    for name in ("lm_head.weight", *(("d2t", "t2d") if vocab == 256 else ())):
        tensors.pop(name, None)
    save_file(tensors, head / "model.safetensors")
    return head


def test_a_head_of_fewer_tokens_without_its_output_matrix_is_refused(tmp_path: Path) -> None:
    """The original trains one; rows of the target's would only draft worse."""
    with pytest.raises(ValueError, match=r"lm_head.weight is missing: .*draft_vocab_size=96 out of 256"):
        detect.read(without_output_matrix(tmp_path, 96))


def test_a_head_of_all_tokens_without_an_output_matrix_takes_the_targets_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pair = Pair(
            str(without_output_matrix(tmp_path, 256)), "target_eagle_a", ORACLE / "safeailab_eagle3_a"
        )
    assert pair.head._head is pair.target.head  # type: ignore[attr-defined]
    assert [
        r.getMessage()
        for r in caplog.records
        if "has no lm_head.weight: the target's is used" in r.getMessage()
    ]
    caplog.clear()
    detect.read(ORACLE / "safeailab_eagle3_a")
    assert not caplog.records


def test_a_flat_head_without_masks_stays_eagle3() -> None:
    read = detect.read(ORACLE / "safeailab_eagle3_a")
    assert read.method == "eagle3"
    assert isinstance(read.settings, TappedSettings) and read.settings.mask_token is None
