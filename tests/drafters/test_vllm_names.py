"""vLLM's speculative_config works unchanged: each key and method name of 0.33 is read, mapped, accepted or refused."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM
from draftproof.config import SpeculativeConfig
from draftproof.drafters import registry
from draftproof.drafters.vllm_names import ANY, TABLE, Row, accepts, defaults, named, read_options
from tests.made import shared
from tests.made.shared import DRAFT, EAGLE3
from tools import vllm_table

# the fields of vLLM 0.33.0's SpeculativeConfig and the names that its `method` may have
KEYS = """
enforce_eager num_speculative_tokens model method draft_tensor_parallel_size tensor_parallel_size quantization
moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration
disable_padded_drafter_batch disable_eagle_block_drop disable_lookahead_block_hashes draft_lm_head_quantization
use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting
target_model_config target_parallel_config num_speculative_tokens_per_batch_size draft_model_config
draft_parallel_config suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests
suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config rejection_sample_method
synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification draft_sample_method
dspark_draft_topk xpress_topc fly_window_size fly_entropy_threshold fly_entropy_top_k
"""
METHODS = """
ngram draft_model suffix custom_class eagle eagle3 extract_hidden_states deepseek_mtp dots3_note_mtp mimo_mtp
mimo_v2_mtp glm4_moe_mtp glm4_moe_lite_mtp glm_ocr_mtp ernie_mtp nemotron_h_mtp exaone_moe_mtp exaone4_5_mtp
qwen3_next_mtp qwen4_exp_mtp qwen3_5_mtp longcat_flash_mtp bailing_hybrid_v3_mtp minimax_m3_mtp bailing_hybrid_mtp mtp
kimi_k3_mtp pangu_ultra_moe_mtp step3p5_mtp step5_mtp hy_v3_mtp hy_v4_mtp gemma4_mtp inkling_mtp glm5_next_mtp dflash
ngram_gpu dspark
"""
VALUES = {"rejection_sample_method": ["standard", "block", "synthetic", "fly"]}
VALUES["draft_sample_method"] = ["greedy", "probabilistic"]
SAMPLES: dict[type, Any] = {bool: True, int: 7, str: "x", float: 0.7, list: [(1, 8, 3)], object: {"a": 1}}
FIELDS = {
    "num_speculative_tokens": 7,
    "parallel_drafting": True,
    "quantization": "fp8",
    "max_model_len": 7,
    "revision": "x",
}
LOGGER = "draftproof.drafters.vllm_names"


def rows(*effects: str, key: str | None = None) -> list[Any]:
    chosen = [
        row
        for row in TABLE
        if row.effect in effects and (row.key == key if key else row.key not in ("method", "model"))
    ]
    return [pytest.param(row, id=row.key if row.value is ANY else f"{row.key}={row.value}") for row in chosen]


def sample(row: Row) -> Any:
    """A value that the row applies to, and that is not the key's default."""
    return SAMPLES[row.kinds[0]] if row.value is ANY else row.value


def test_the_table_has_every_key_and_every_method_once() -> None:
    assert sorted({row.key for row in TABLE}) == sorted(KEYS.split()) == sorted({"method", *defaults()})
    assert sorted(str(row.value) for row in TABLE if row.key == "method") == sorted(METHODS.split())
    for key, values in VALUES.items():
        assert [row.value for row in TABLE if row.key == key] == values
    assert len({(row.key, row.value) for row in TABLE}) == len(TABLE)


def test_of_several_values_the_default_is_vllms() -> None:
    assert defaults()["rejection_sample_method"] == "standard"
    assert defaults()["draft_sample_method"] == "greedy"


@pytest.mark.parametrize("row", rows("accepted"))
def test_what_means_nothing_here_is_accepted_with_one_line(
    row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    assert read_options({row.key: row.default}, ()) == {} and not caplog.records
    assert read_options({row.key: None}, ()) == {} and not caplog.records
    value = sample(row)
    assert read_options({row.key: value}, ()) == {}
    silent = value == row.default
    assert [r.getMessage() for r in caplog.records] == (
        [] if silent else [f"speculative_config: nothing to change for {row.key}={value!r} ({row.why})"]
    )


@pytest.mark.parametrize("row", [p for p in rows("accepted") if p.values[0].value is ANY])
def test_what_vllm_does_not_take_is_not_accepted_either(row: Row) -> None:
    wrong = "yes" if str not in row.kinds else 5
    with pytest.raises(ValueError, match=f"^speculative_config: {row.key}={wrong!r}: must be "):
        read_options({row.key: wrong}, ())


@pytest.mark.parametrize("row", rows("refused"))
def test_what_cannot_be_honoured_is_refused_with_what_to_use_instead(row: Row) -> None:
    value = sample(row)
    with pytest.raises(ValueError) as caught:
        read_options({row.key: value}, ())
    assert str(caught.value) == f"speculative_config: {row.key}={value!r}: not supported: {row.why}"
    assert "\n" not in row.why and any(word in row.why for word in ("leave it out", "use ", "give "))
    assert read_options({row.key: None}, ()) == read_options({row.key: row.default}, ()) == {}


@pytest.mark.parametrize("row", rows("read"))
def test_what_is_read_is_a_setting_of_ours(row: Row, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    if row.key in {f.name for f in dataclasses.fields(SpeculativeConfig)}:
        value = FIELDS[row.key]
        settings = SpeculativeConfig.from_dict({row.key: value})
        assert getattr(settings, row.key) == value != getattr(SpeculativeConfig(), row.key)
        assert settings.options == {}
        return
    owners = [
        m for m in registry.METHODS.values() if row.key in {f.name for f in dataclasses.fields(m.options)}
    ]
    (owner,) = owners
    own = {f.name for f in dataclasses.fields(owner.options)}
    assert read_options({row.key: 7}, own) == read_options({row.key: 7}, None) == {row.key: 7}
    assert read_options({row.key: None}, own) == {} and not caplog.records
    assert read_options({row.key: 7}, ()) == {}  # in vLLM every method has every key
    assert [r.getMessage() for r in caplog.records] == [
        f"speculative_config: nothing to change for {row.key}=7 (a setting of other methods)"
    ]


@pytest.mark.parametrize("row", rows("read", "mapped", key="method"))
def test_a_methods_name_becomes_ours(row: Row) -> None:
    name = str(row.value)
    if name == "custom_class":
        settings = named(SpeculativeConfig(method=name, model="here.Mine"))
        assert (settings.method, settings.model) == ("here.Mine", None)
        return
    settings = named(SpeculativeConfig(method=name, model="folder"))
    assert row.becomes and set(row.becomes) <= set(registry.METHODS)
    assert settings.model == "folder"
    if len(row.becomes) == 1:
        assert settings.method == row.becomes[0]
    else:
        assert {ours for ours in registry.METHODS if accepts(name, ours)} == set(row.becomes)


def test_a_method_that_does_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"method='extract_hidden_states': not supported: .*taps=\.\.\."):
        LLM(speculative_config={"method": "extract_hidden_states", "num_speculative_tokens": 1})


@pytest.mark.parametrize("row", rows("read", "mapped", key="model"))
def test_a_model_may_be_a_methods_name(row: Row) -> None:
    if row.value is ANY:
        assert named(SpeculativeConfig(model="org/name")).model == "org/name"
        return
    settings = named(SpeculativeConfig(model=str(row.value)))
    assert (settings.method, settings.model) == (row.becomes[0], None)


@pytest.mark.parametrize(
    ("method", "model"),
    [("ngram", "ngram"), ("ngram_gpu", "ngram_gpu"), ("ngram_gpu", "ngram"), ("suffix", "suffix")],
)
def test_a_method_without_checkpoint_may_stand_in_model_too(method: str, model: str) -> None:
    assert named(SpeculativeConfig(method=method, model=model)).model is None


def test_a_folder_may_have_a_methods_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named(SpeculativeConfig(method="eagle3", model="eagle3")).model is None
    (tmp_path / "eagle3").mkdir()
    assert named(SpeculativeConfig(method="eagle3", model="eagle3")).model == "eagle3"


def test_a_dotted_name_alone_is_a_class_unless_it_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = named(SpeculativeConfig(model="package.module.Class"))
    assert (settings.method, settings.model) == ("package.module.Class", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "head.v2").mkdir()
    for folder in ("head.v2", "package.module/Class", "v2.5", "plain", "./head.v2"):
        assert named(SpeculativeConfig(model=folder)).method is None


@pytest.mark.parametrize("model", [None, "plain", "a/b.C", "a..b"])
def test_custom_class_needs_a_dotted_name(model: str | None) -> None:
    with pytest.raises(ValueError, match=r"method='custom_class', model=.*give model='module.Class'"):
        LLM(speculative_config={"method": "custom_class", "model": model, "num_speculative_tokens": 3})


@pytest.mark.parametrize("key", VALUES)
def test_a_value_that_does_not_exist_is_refused_with_those_that_do(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key}='{VALUES[key][0]}_': did you mean '{VALUES[key][0]}'"):
        read_options({key: VALUES[key][0] + "_"}, ())
    with pytest.raises(ValueError, match=f"{key}=5: must be one of {VALUES[key][0]}"):
        read_options({key: 5}, ())


FULL = {  # all keys that vLLM accepts beside a head
    "num_speculative_tokens": 3,
    "draft_tensor_parallel_size": 1,
    "tensor_parallel_size": None,
    "quantization": None,
    "max_model_len": 4096,
    "revision": None,
    "enforce_eager": False,
    "moe_backend": "auto",
    "attention_backend": "FLASH_ATTN",
    "kv_cache_dtype": "auto",
    "disable_padded_drafter_batch": True,
    "rejection_sample_method": "standard",
    "draft_sample_method": "probabilistic",
    "use_local_argmax_reduction": True,
    "parallel_drafting": False,
    "prompt_lookup_max": None,
    "suffix_decoding_max_tree_depth": 24,
}


def test_a_whole_config_of_vllms_runs_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    llm = LLM(
        dtype="float32", max_model_len=64, speculative_config={"method": "eagle3", "model": EAGLE3, **FULL}
    )
    assert llm.num_speculative_tokens == 3
    assert len(caplog.records) == 1
    for key in ("enforce_eager", "moe_backend", "attention_backend", "draft_sample_method"):
        assert f"{key}={FULL[key]!r}" in caplog.text
    assert "suffix" not in caplog.text  # a default


CHECKPOINTS: dict[str, Callable[[], str]] = {
    "tiny-eagle3": lambda: EAGLE3,
    "tiny-mtp": lambda: shared.MTP,
    "assistant": shared.gemma4_assistant,
    "eagle1": shared.eagle1,
    "peagle": shared.peagle,
    "dflash2": shared.dflash2,
    "xpress": shared.xpress,
    "pard": shared.pard,
}


@pytest.mark.parametrize(
    ("method", "model", "ours"),
    [
        ("eagle3", "peagle", "peagle"),
        ("eagle3", "tiny-eagle3", "eagle3"),
        ("mtp", "assistant", "gemma4_mtp"),
        ("mtp", "tiny-mtp", "mtp"),
        ("qwen3_next_mtp", "tiny-mtp", "mtp"),
        ("dflash", "dflash2", "dflash2"),
        ("dflash", "xpress", "xpress"),
        ("draft_model", "pard", "pard"),
        ("eagle", "eagle1", "eagle"),
    ],
)
def test_the_checkpoints_content_says_which(
    method: str, model: str, ours: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = shared.gemma4() if model == "assistant" else None
    config = {"method": method, "model": CHECKPOINTS[model](), "num_speculative_tokens": 2}
    chain = {"method": "chain", "drafters": [config]}
    llm = LLM(target, dtype="float32", max_model_len=64, speculative_config=config)
    same = LLM(target, dtype="float32", max_model_len=64, speculative_config={**config, "method": ours})
    inside = LLM(target, dtype="float32", max_model_len=64, speculative_config=chain)
    drafts = llm.draft([5, 6, 7, 8], 2)
    assert len(drafts) == 2 and drafts == same.draft([5, 6, 7, 8], 2) == inside.draft([5, 6, 7, 8], 2)


@pytest.mark.parametrize(
    ("method", "model", "ours"),
    [
        ("eagle", "tiny-eagle3", "eagle3"),
        ("mtp", "tiny-eagle3", "eagle3"),
        ("dflash", "tiny-mtp", "mtp"),
        ("eagle3", "eagle1", "eagle"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(method: str, model: str, ours: str) -> None:
    with pytest.raises(ValueError, match=f"method='{method}', but .* is a checkpoint for '{ours}'"):
        LLM(speculative_config={"method": method, "model": CHECKPOINTS[model]()})


@pytest.mark.parametrize("parallel", [True, False, None])
@pytest.mark.parametrize(
    ("method", "model"),
    [("eagle3", "peagle"), ("draft_model", "pard"), ("dflash", "dflash2")],
)
def test_parallel_drafting_is_what_such_checkpoints_do(
    method: str, model: str, parallel: bool | None
) -> None:
    config = {"method": method, "model": CHECKPOINTS[model](), "parallel_drafting": parallel}
    config |= {"num_speculative_tokens": 2}
    assert LLM(dtype="float32", max_model_len=64, speculative_config=config).draft([5, 6, 7], 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": EAGLE3}, "method='eagle3' drafts one token after another; leave it out"),
        ({"model": DRAFT}, "method='draft_model' drafts one token after another"),
        ({"method": "ngram"}, "parallel_drafting=True: method='ngram' has no checkpoint"),
    ],
)
def test_parallel_drafting_is_refused_where_nothing_was_trained_for_it(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(speculative_config={**config, "parallel_drafting": True})


def test_a_refused_key_in_a_chain_says_whose_it_is() -> None:
    members = [{"method": "ngram"}, {"model": EAGLE3, "draft_tensor_parallel_size": 2}]
    with pytest.raises(
        ValueError, match=r"drafters\[1\]: draft_tensor_parallel_size=2: .*there is one device"
    ):
        LLM(speculative_config={"method": "chain", "drafters": members})
    with pytest.raises(ValueError, match=r"config: tensor_parallel_size=1: .*leave it out"):
        LLM(speculative_config={"method": "chain", "drafters": members[:1], "tensor_parallel_size": 1})


def test_the_page_has_the_table() -> None:
    """`python -m tools.vllm_table` prints it."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    first = page.index(vllm_table.HEAD[0])
    table = page[first:].split("\n\n", 1)[0]
    assert table.splitlines() == list(vllm_table.lines())
