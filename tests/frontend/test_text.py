"""Tokenizer, incremental detokenisation and stop rules: tokens give the same text however they are split."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from draftproof import assets
from draftproof.engine.deltas import stopping_point
from draftproof.engine.interface import RequestSpec
from draftproof.frontend.text import Detokenizer, StopStrings, Tokenizer
from draftproof.models.tokenizer_file import BROKEN
from draftproof.types import SamplingParams

EOS = 2
TINY = Tokenizer(assets.path(assets.TARGET))
BYTE_IDS = [TINY._backend.token_to_id(piece) for piece in "ðĿĳĺãģĤé"]  # lone bytes of longer characters


def spaces_and_bytes(directory: Path) -> Tokenizer:
    """A sentencepiece-like tokenizer: spaces as U+2581, unknown characters as bytes, leading space dropped."""
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "▁bc", "a", "b", "c", "▁▁"]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"
    )
    backend = Backend(model)
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return spaces_and_bytes(tmp_path_factory.mktemp("tokenizer"))


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


class Ending(NamedTuple):
    """The result of pushing tokens: how many are kept, their text, and why the output ended."""

    kept: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Output:
    """Both stages of stop rules: ids and length in the engine, then stop strings in the front end."""

    def __init__(self, params: SamplingParams, max_tokens: int, detokenizer: Detokenizer | None) -> None:
        eos_ids = frozenset(() if params.ignore_eos else (0, EOS))
        self.spec = RequestSpec(
            token_ids=[],
            params=params,
            row_seed=0,
            limit=max_tokens,
            eos_ids=eos_ids,
            stop_ids=eos_ids | frozenset(params.stop_token_ids or ()),
        )
        self.strings = StopStrings(params, detokenizer)
        self.num_tokens = 0

    @property
    def text(self) -> str:
        return self.strings.text

    def push(self, ids: list[int]) -> Ending:
        kept, reason, stop = stopping_point(self.spec, self.num_tokens, ids)
        found = self.strings.push(ids[:kept], reason)
        self.num_tokens += found.num_kept
        if found.stop is not None:
            return Ending(found.num_kept, found.text, "stop", found.stop)
        return Ending(kept, found.text, reason, stop)

    def flush(self) -> str:
        return self.strings.flush()


def checker(params: SamplingParams, max_tokens: int = 1000, tokenizer: Tokenizer = TINY) -> Output:
    detokenizer = Detokenizer(tokenizer, params.skip_special_tokens) if params.detokenize else None
    return Output(params, max_tokens, detokenizer)


def run(rules: Output, ids: list[int], sizes: list[int]) -> tuple[list[int], str, Ending]:
    """Push `ids` in chunks of `sizes` (repeated) until the output ends: kept ids, all text, last ending."""
    kept: list[int] = []
    text, at, turn = "", 0, 0
    ending = Ending(0, "")
    while at < len(ids) and ending.finish_reason is None:
        chunk = ids[at : at + sizes[turn % len(sizes)]]
        at, turn = at + len(chunk), turn + 1
        ending = rules.push(chunk)
        kept += chunk[: ending.kept]
        text += ending.text
        assert rules.text == text
    if ending.finish_reason is None:
        text += rules.flush()
    return kept, text, Ending(len(kept), text, ending.finish_reason, ending.stop_reason)


token_lists = st.lists(st.one_of(st.integers(0, 8191), st.sampled_from(BYTE_IDS), st.just(EOS)), max_size=40)


class TestTokenizer:
    def test_agrees_with_transformers(self) -> None:
        transformers = pytest.importorskip("transformers")
        reference = transformers.AutoTokenizer.from_pretrained(str(assets.path(assets.TARGET)))
        text = "def f(x):\n    return 'é🎉'  # <|im_end|> done"
        assert TINY.encode(text) == reference(text)["input_ids"]
        ids = TINY.encode(text)
        assert TINY.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert TINY.decode(ids, False) == reference.decode(ids, skip_special_tokens=False) == text
        assert TINY.vocab_size == len(reference) == 8192
        assert (TINY.eos_token_id, TINY.bos_token_id) == (reference.eos_token_id, None)
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1 + 1?"}]
        options = {"add_generation_prompt": True, "return_dict": False}
        assert TINY.chat(messages) == reference.apply_chat_template(messages, **options)
        template = "{{ bos_token }}{{ eos_token }}{{ messages[0]['content'] }}{{ extra }}"
        expected = reference.apply_chat_template(
            messages, tokenize=True, chat_template=template, extra="x", return_dict=False
        )
        assert TINY.chat(messages, chat_template=template, extra="x", add_generation_prompt=False) == expected

    def test_continues_the_last_message_when_asked(self) -> None:
        messages = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "one and"}]
        text = TINY.decode(TINY.chat(messages, continue_final_message=True), skip_special_tokens=False)
        assert text.endswith("assistant\none and")

    def test_chat_template_that_refuses_is_a_value_error(self) -> None:
        template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(ValueError, match="roles must alternate"):
            TINY.chat([{"role": "user", "content": "x"}], chat_template=template)

    def test_parts_of_text_are_one_text(self) -> None:
        parts = [{"type": "text", "text": "one"}, "two", {"type": "text", "text": "three"}]
        whole = TINY.chat([{"role": "user", "content": "one\ntwo\nthree"}])
        assert TINY.chat([{"role": "user", "content": parts}]) == whole
        assert TINY.chat([{"role": "user", "content": ["one\ntwo\nthree"]}]) == whole

    @pytest.mark.parametrize(
        ("message", "words"),
        [
            (
                {"content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
                r"content\[1\]=.*image_url.*must be",
            ),
            ({"content": [{"type": "text"}]}, r"content\[0\]=.*must be"),
            ({"content": [5]}, r"content\[0\]=5: must be"),
            ({"content": 5}, "content=5: must be text"),
            ({"content": None}, "content=None: must be text"),
            ({}, "content=None: must be text"),
        ],
    )
    def test_content_that_is_no_text_is_named(self, message: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=rf"messages\[0\]: {words}"):
            TINY.chat([{"role": "user", **message}])

    def test_a_message_with_tool_calls_needs_no_content(self) -> None:
        template = "{{ messages[0]['tool_calls'][0] }}"
        message = {"role": "assistant", "tool_calls": ["look"]}
        assert TINY.decode(TINY.chat([message], chat_template=template)) == "look"

    def test_an_option_that_would_change_nothing_is_refused(self) -> None:
        messages = [{"role": "user", "content": "x"}]
        with pytest.raises(
            ValueError, match=r"^qqq=3: the chat template of .* has no use for it; leave it out"
        ):
            TINY.chat(messages, qqq=3)
        with pytest.raises(
            ValueError, match=r"add_generation_prmpt=True: .*did you mean 'add_generation_prompt'"
        ):
            TINY.chat(messages, add_generation_prmpt=True)
        assert TINY.chat(messages, tools=None) == TINY.chat(messages)

    @pytest.mark.parametrize("wrong", [{"content": "x"}, {"role": 3, "content": "x"}, "x"])
    def test_a_message_without_a_role_is_named(self, wrong: Any) -> None:
        with pytest.raises(ValueError, match=r"messages\[1\]=.*role"):
            TINY.chat([{"role": "user", "content": "x"}, wrong])

    def test_messages_may_be_any_iterable_but_nothing_else(self) -> None:
        message = {"role": "user", "content": "x"}
        assert TINY.chat(iter([message])) == TINY.chat([message])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="messages=3: must be a list"):
            TINY.chat(3)  # type: ignore[arg-type]

    def test_missing_chat_template_is_a_value_error(self, other: Tokenizer) -> None:
        with pytest.raises(ValueError, match="chat template"):
            other.chat([{"role": "user", "content": "x"}])

    @pytest.mark.parametrize(
        "extra",
        [
            {"add_bos_token": True, "add_eos_token": True},
            {"bos_token": {"__type": "AddedToken", "content": "<|im_start|>"}, "eos_token": "<|im_end|>"},
            {"eos_token": "<|only here|>"},
            {"extra_special_tokens": ["<|only here|>"]},
        ],
    )
    def test_configuration_counts_as_much_as_in_transformers(
        self, tmp_path: Path, extra: dict[str, Any]
    ) -> None:
        transformers = pytest.importorskip("transformers")
        shutil.copy(assets.path(assets.TARGET) / "tokenizer.json", tmp_path)
        config = {"tokenizer_class": "TokenizersBackend", **extra}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
        found = Tokenizer(tmp_path)
        text = "a <|only here|> b"
        assert found.encode(text) == reference(text)["input_ids"]
        assert (found.bos_token_id, found.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)
        assert found.vocab_size == len(reference)

    def test_tokenizer_of_another_kind_is_read_as_transformers_does(self, other: Tokenizer) -> None:
        assert other.eos_token_id == 1
        assert other.decode(other.encode("abc")) == "abc"

    def test_missing_directory_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"tokenizer=.*nowhere.*no such directory"):
            Tokenizer(tmp_path / "nowhere")

    def test_a_folder_without_one_is_told_what_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        with pytest.raises(ValueError, match=r"there is no tokenizer.json; give a folder that has one"):
            Tokenizer(tmp_path)

    def test_broken_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read"):
            Tokenizer(tmp_path)

    def test_directory_without_tokenizer_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"tokenizer=.*cannot be loaded"):
            Tokenizer(tmp_path)

    def test_lone_surrogate_is_a_value_error(self) -> None:
        with pytest.raises(ValueError, match="valid Unicode"):
            TINY.encode("a\ud800b")


class TestDetokenizer:
    @given(ids=token_lists, skip=st.booleans())
    def test_pieces_make_the_whole_text(self, ids: list[int], skip: bool) -> None:
        assert "".join(pieces(Detokenizer(TINY, skip), ids)) == TINY.decode(ids, skip)

    @given(text=st.text(max_size=30), prompt=st.text(max_size=10))
    def test_no_piece_is_a_broken_character(self, text: str, prompt: str) -> None:
        ids = TINY.encode(text, add_special_tokens=False)
        found = pieces(Detokenizer(TINY, False, TINY.encode(prompt, add_special_tokens=False)), ids)
        assert "".join(found) == text
        assert BROKEN in text or not any(BROKEN in piece for piece in found)

    @settings(max_examples=200)
    @given(data=st.data())
    def test_pieces_make_the_whole_text_with_byte_fallback(
        self, other: Tokenizer, data: st.DataObject
    ) -> None:
        text = data.draw(st.lists(st.sampled_from(["é", "😀", " ", "a", "bc", "  "]), max_size=10))
        typical = other.encode("".join(text))
        ids = data.draw(
            st.one_of(st.just(typical), st.lists(st.integers(0, other.vocab_size - 1), max_size=20))
        )
        assert "".join(pieces(Detokenizer(other), ids)) == other.decode(ids)

    def test_space_after_the_prompt_is_kept(self, other: Tokenizer) -> None:
        first, second = (other._backend.token_to_id(piece) for piece in ("▁a", "▁bc"))
        assert pieces(Detokenizer(other, context_ids=[first]), [second]) == [" bc", ""]
        assert pieces(Detokenizer(other), [second]) == ["bc", ""]

    def test_character_that_never_completes_is_given_at_the_end(self) -> None:
        half = TINY.encode("🎉")[:-1]
        assert len(half) > 0
        assert pieces(Detokenizer(TINY), [*TINY.encode("ok"), *half]) == ["ok", *[""] * len(half), BROKEN]

    def test_text_appears_as_soon_as_it_is_certain(self) -> None:
        ids = TINY.encode("one two three")
        assert all(pieces(Detokenizer(TINY), ids)[:-1])


class TestStops:
    @settings(max_examples=300)
    @given(
        ids=token_lists,
        sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
        stops=st.lists(st.text("abe \n", min_size=1, max_size=4), max_size=3),
        include=st.booleans(),
        min_tokens=st.integers(0, 5),
        max_tokens=st.integers(5, 50),
    )
    def test_chunks_do_not_matter(
        self,
        ids: list[int],
        sizes: list[int],
        stops: list[str],
        include: bool,
        min_tokens: int,
        max_tokens: int,
    ) -> None:
        params = SamplingParams(
            stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=50
        )
        assert run(checker(params, max_tokens), ids, [1]) == run(checker(params, max_tokens), ids, sizes)

    @given(
        text=st.text("ab", max_size=30), stop=st.text("ab", min_size=1, max_size=4), size=st.integers(1, 6)
    )
    def test_text_ends_before_the_first_stop_string(self, text: str, stop: str, size: int) -> None:
        ids = TINY.encode(text)
        kept, found, ending = run(checker(SamplingParams(stop=stop)), ids, [size])
        if stop not in text:
            assert (kept, found, ending.finish_reason) == (ids, text, None)
            return
        assert found == text[: text.index(stop)]
        assert (ending.finish_reason, ending.stop_reason) == ("stop", stop)
        assert stop in TINY.decode(kept)
        assert stop not in TINY.decode(kept[:-1])

    def test_stop_string_across_chunks_is_never_shown(self) -> None:
        rules = checker(SamplingParams(stop="END"))
        shown = [rules.push(TINY.encode(piece)).text for piece in ("x E", "N", "x E", "N", "D tail")]
        assert "".join(shown) == "x ENx "
        assert shown[0] == "x "

    def test_stop_string_is_kept_when_asked(self) -> None:
        params = SamplingParams(stop=["b c", "c"], include_stop_str_in_output=True)
        _, text, ending = run(checker(params), TINY.encode("a b c d"), [3])
        assert (text, ending.stop_reason) == ("a b c", "b c")

    def test_the_string_that_ends_first_wins(self) -> None:
        _, text, ending = run(
            checker(SamplingParams(stop=["nothing", "thing is", "is"])), TINY.encode("this"), [1]
        )
        assert (text, ending.stop_reason) == ("th", "is")

    def test_end_of_text_has_no_stop_reason_and_no_text(self) -> None:
        ids = [*TINY.encode("hi"), EOS, *TINY.encode("never")]
        rules = checker(SamplingParams(skip_special_tokens=False))
        assert rules.push(ids) == Ending(len(TINY.encode("hi")) + 1, "hi", "stop", None)

    def test_end_of_text_can_be_ignored(self) -> None:
        ids = [EOS, *TINY.encode("hi")]
        kept, text, ending = run(checker(SamplingParams(ignore_eos=True)), ids, [2])
        assert (kept, text, ending.finish_reason) == (ids, "hi", None)

    def test_stop_token_gives_its_id_and_its_text_only_when_asked(self) -> None:
        ids = TINY.encode("a b c")
        rules = checker(SamplingParams(stop_token_ids=[ids[1]]))
        assert rules.push(ids) == Ending(2, "a", "stop", ids[1])
        rules = checker(SamplingParams(stop_token_ids=[ids[1]], include_stop_str_in_output=True))
        assert rules.push(ids) == Ending(2, "a b", "stop", ids[1])

    def test_nothing_ends_before_min_tokens(self) -> None:
        ids = [*TINY.encode("a b"), EOS, *TINY.encode(" b"), EOS]
        assert len(ids) == 5
        params = SamplingParams(min_tokens=4, stop=" b")
        kept, text, ending = run(checker(params), ids, [5])
        assert (kept, text, ending.stop_reason) == (ids, "a b b", None)
        assert ending.finish_reason == "stop"

    def test_length_wins_over_nothing_but_a_stop(self) -> None:
        ids = TINY.encode("a b c")
        assert checker(SamplingParams(), max_tokens=2).push(ids) == Ending(2, "a b", "length", None)
        rules = checker(SamplingParams(stop="b"), max_tokens=2)
        assert rules.push(ids) == Ending(2, "a ", "stop", "b")

    def test_unfinished_character_is_shown_at_the_limit(self) -> None:
        half = TINY.encode("🎉")[:-1]
        assert checker(SamplingParams(), max_tokens=len(half)).push(half).text == BROKEN

    def test_held_text_is_given_on_abort(self) -> None:
        rules = checker(SamplingParams(stop="xyz"))
        assert rules.push(TINY.encode("a xy")).text == "a "
        assert rules.flush() == "xy"
        assert rules.text == "a xy"

    def test_without_detokenizing_only_ids_count(self) -> None:
        rules = checker(SamplingParams(detokenize=False))
        assert rules.push([500, 501, EOS, 502]) == Ending(3, "", "stop", None)
        with pytest.raises(ValueError, match="detokenize"):
            checker(SamplingParams(detokenize=False, stop="x"))
