"""Text and token ids: the tokenizer, incremental detokenization, and stop strings."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from draftproof.models.tokenizer_file import BROKEN, open_tokenizer
from draftproof.schema import did_you_mean, read_json, section, shown
from draftproof.types import FinishReason, SamplingParams

SIZES_KEPT = 1 << 13
# What a template's own code raises; a range that is too long for the sandbox is an OverflowError.
OF_TEMPLATES = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
CHAT_OPTIONS = frozenset({"add_generation_prompt", "chat_template", "continue_final_message"})
PLAIN_CLASSES = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)  # transformers' classes for any tokenizer.json
ENDS = frozenset({"add_bos_token", "add_eos_token"})  # keys that override a tokenizer.json's own BOS and EOS
CONTEXT_TOKENS = (
    6  # last tokens of a prompt that are kept: enough to decide whether an output starts with a space
)


class Tokenizer:
    """One tokenizer directory. Encoding and decoding need only `tokenizers`; chat templates load transformers."""

    def __init__(self, directory: str | Path) -> None:
        """Raises ValueError if `directory` is missing or has no readable tokenizer."""
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise ValueError(
                f"tokenizer={str(directory)!r}: no such directory; give one with a tokenizer.json"
            )
        config = _read_json(self.directory / "tokenizer_config.json")
        self._chat: Any = None
        self._backend = _read_backend(self.directory, config)
        if self._backend is None:
            self._backend = self._hugging_face().backend_tokenizer
            self._backend.no_truncation()
            self._backend.no_padding()
        self.bos_token_id = self._special_id(config, "bos_token")
        self.eos_token_id = self._special_id(config, "eos_token")
        self._fallback_ids = _byte_fallback_ids(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        # Called for each token of an output and its alternatives.
        self.piece = functools.lru_cache(SIZES_KEPT)(self._piece)
        self.size_alone = functools.lru_cache(SIZES_KEPT)(self._size_alone)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's own vocabulary may be padded beyond it."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the special tokens that the tokenizer adds around a text."""
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"prompt={text!r:.80}: not a string of valid Unicode ({error})") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids unknown to the tokenizer have no text."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        rewrite: Callable[[str], str] = lambda text: text,
        **options: Any,
    ) -> list[int]:
        """Ids of a conversation under the model's chat template; `rewrite` is applied to the text before encoding.

        `options` are those in `CHAT_OPTIONS`, and variables of the template (tools, enable_thinking).
        `add_generation_prompt` is on unless the last message is to be continued. Text parts of a message are joined by
        newlines, as in vLLM. Raises ValueError for a message without a role or content, an option without effect, a
        missing template, or messages that the template refuses.
        """
        import jinja2

        if not isinstance(messages, Iterable):
            raise ValueError(f"messages={messages!r:.80}: must be a list of messages")
        messages = [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        options.setdefault("add_generation_prompt", not options.get("continue_final_message", False))
        try:
            text = self._hugging_face().apply_chat_template(messages, tokenize=False, **options)
        except (jinja2.TemplateError, *OF_TEMPLATES) as error:
            raise ValueError(f"messages: the chat template of {self.directory} failed: {error}") from error
        self._check_chat_options(options)
        return self.encode(rewrite(text), add_special_tokens=False)

    def _check_chat_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for an option that would have no effect."""
        variables = {name for name, value in options.items() if value is not None} - CHAT_OPTIONS
        if not variables:
            return
        template = self._hugging_face().get_chat_template(options.get("chat_template"), options.get("tools"))
        named = set(re.findall(r"\w+", template))
        for name in sorted(variables - named):
            hint = did_you_mean(name, [*CHAT_OPTIONS, *named]) or "leave it out"
            raise ValueError(
                f"{name}={shown(options[name])}: the chat template of {self.directory} has no use for it; {hint}"
            )

    def chat_template(self) -> str:
        """The chat template (the one for tools, if it differs); empty if there is none."""
        try:
            return str(self._hugging_face().get_chat_template(tools=[]))
        except ValueError:
            return ""

    def is_special_text(self, text: str) -> bool:
        """Whether `text` is a special token, which decoding can skip."""
        found = self.token_id(text)
        return found is not None and self.is_special(found)

    def token_id(self, text: str) -> int | None:
        """The id of the token `text`; None if it is not a single token."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    def is_special(self, token_id: int) -> bool:
        """Whether this is a special token, which decoding can skip."""
        return token_id in self._special_ids

    def special_texts(self) -> frozenset[str]:
        """The special tokens, as written in prompts."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token.content for token in added.values() if token.special)

    def to_json(self) -> str:
        """The whole tokenizer, as the content of a tokenizer.json."""
        return str(self._backend.to_str())

    def holds_back(self, token_id: int) -> bool:
        """Whether text up to this token may still change: a run of byte tokens is decoded as a whole."""
        return token_id in self._fallback_ids

    def _piece(self, token_id: int) -> str:
        """Text of a single token, special or not."""
        return self.decode([token_id], skip_special_tokens=False)

    def _size_alone(self, token_id: int, skip_special_tokens: bool) -> int:
        """Number of characters of a single token's text."""
        return len(self.decode([token_id], skip_special_tokens))

    def _special_id(self, config: Mapping[str, Any], name: str) -> int | None:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text is None and self._chat is not None:
            text = getattr(self._chat, name)
        found = None if text is None else self._backend.token_to_id(str(text))
        return None if found is None else int(found)

    def _hugging_face(self) -> Any:
        """transformers' tokenizer of this directory, loaded on first use, which takes more than a second."""
        if self._chat is None:
            from transformers import AutoTokenizer

            try:  # without trust_remote_code it prompts on stdin whether to run the folder's code
                loaded = AutoTokenizer.from_pretrained(
                    str(self.directory), local_files_only=True, trust_remote_code=False
                )
            except Exception as error:
                raise ValueError(
                    f"tokenizer={str(self.directory)!r}: cannot be loaded: {self._why_not(error)}"
                ) from error
            if not isinstance(getattr(loaded, "backend_tokenizer", None), Backend):
                raise ValueError(
                    f"tokenizer={str(self.directory)!r}: has no tokenizer.json and cannot be converted"
                )
            self._chat = loaded
        return self._chat

    def _why_not(self, error: Exception) -> str:
        """Why transformers did not load this directory, in one line."""
        needed = "there is no tokenizer.json; give a folder that has one"
        missing = not (self.directory / "tokenizer.json").is_file()
        for name in ("tokenizer_config.json", "config.json"):
            if missing and "auto_map" in _read_json(self.directory / name):
                return f"{name} names code of its own (auto_map), which is never run, and {needed}"
        said = " ".join(str(error).split())
        return f"{needed}. transformers says: {said}" if missing else said


def _plain_message(message: Any, where: str) -> Mapping[str, Any]:
    """`message` with its content as one text; no content is allowed only with tool calls. Else ValueError."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(
            f'{where}={message!r:.80}: must be a mapping with a role, such as {{"role": "user", "content": "Hi"}}'
        )
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"{where}: content={shown(content)}: must be text, or a list of parts of text")
    seen = ({"type": "image"}, {"type": "video"})
    if any(part in seen for part in content):  # templates place these among the text parts
        for i, part in enumerate(content):
            if part not in seen:
                _text_of(part, f"{where}: content[{i}]")
        return message
    texts = [_text_of(part, f"{where}: content[{i}]") for i, part in enumerate(content)]
    return {**message, "content": "\n".join(texts)}


def _text_of(part: Any, where: str) -> str:
    """Text of one part of a message's content."""
    text = part if isinstance(part, str) else None
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(
            f'{where}={shown(part)}: must be {{"type": "text", "text": "..."}}; images and other parts are not served'
        )
    return text


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty if there is no file."""
    return read_json(path) if path.is_file() else {}


def _read_backend(directory: Path, config: Mapping[str, Any]) -> Any:
    """The tokenizer of tokenizer.json, which loads 20 times faster than transformers' class; None if they might differ.

    transformers uses tokenizer.json unchanged for byte-level BPE, and if the configuration names neither a family's
    class nor BOS and EOS settings; it adds special tokens that only the configuration names.
    """
    backend = open_tokenizer(directory)
    if backend is None:
        return None
    is_byte_level = type(backend.model).__name__ == "BPE" and "ByteLevel" in repr(backend.decoder)
    is_plain = config.get("tokenizer_class") in PLAIN_CLASSES and not ENDS & config.keys()
    if not is_byte_level and not is_plain:
        return None
    named = [config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")]
    where, extra = str(directory / "tokenizer_config.json"), config.get("extra_special_tokens") or []
    if not isinstance(extra, (dict, list)):
        raise ValueError(f"{where}: extra_special_tokens={shown(extra)}: must be a list of tokens")
    named += extra.values() if isinstance(extra, dict) else extra
    named += section(config, "added_tokens_decoder", where).values()
    contents = {str(t.get("content") if isinstance(t, dict) else t) for t in named if t is not None}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    return backend if contents <= known else None


def _byte_fallback_ids(backend: Any) -> frozenset[int]:
    """Ids of the tokens <0x00>..<0xFF>, for tokenizers with byte fallback; else empty."""
    if "ByteFallback" not in repr(backend.decoder):
        return frozenset()
    found = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in found if i is not None)


class Detokenizer:
    """Text of one output, token by token: the concatenated pieces equal the text of all tokens decoded at once.

    Only a window of tokens is decoded: those since the last place where the text was complete, and some before,
    because a token's text may depend on whether something precedes it. `context_ids` is the prompt (its last few
    tokens are used).
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(context_ids[-CONTEXT_TOKENS:])
        self._num_complete = len(self._window)  # tokens of the window whose text is released
        text = self._decode()
        self._num_out = len(text) - text.endswith(BROKEN)  # released characters of the window's text

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now certain. An incomplete character is held back."""
        if self._skip and self._tokenizer.is_special(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.holds_back(token_id):
            return ""
        text = self._decode()
        # The last bytes may be an incomplete character: it is decoded as one BROKEN at the very end.
        if text.endswith(BROKEN):
            delta = text[self._num_out : -1]
            self._num_out += len(delta)
            return delta
        delta = text[self._num_out :]
        self._num_out += len(delta)
        if delta:
            del self._window[: self._num_complete]
            self._num_complete = len(self._window)
            alone = len(self._window) == 1
            self._num_out = self._tokenizer.size_alone(token_id, self._skip) if alone else len(self._decode())
        return delta

    def flush(self) -> str:
        """The text held back so far, as in the whole output decoded at once."""
        text = self._decode()[self._num_out :]
        self._num_out += len(text)
        return text

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip)


@dataclass(frozen=True, slots=True)
class StopResult:
    """Result of new tokens: the first `num_kept` are kept and `text` is released; the rest is dropped because the stop
    string `stop` ended the output."""

    num_kept: int
    text: str
    stop: str | None = None


class StopStrings:
    """One output's text, and the check for stop strings; the engine checks stop ids and lengths. Results depend only on
    the tokens, not on how many come at once."""

    def __init__(self, params: SamplingParams, detokenizer: Detokenizer | None) -> None:
        """`detokenizer` None: no text is produced."""
        if detokenizer is None and params.stop_strings:
            raise ValueError("stop: stop strings need text; leave detokenize=True (and give a tokenizer)")
        self._params = params
        self._stops = params.stop_strings
        self._detokenizer = detokenizer
        self._num_tokens = 0
        self._num_released = 0
        self._num_exempt = 0  # characters of the first min_tokens tokens: no stop string may end in them
        self._text = ""

    @property
    def text(self) -> str:
        """All text released so far."""
        return self._text[: self._num_released]

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> StopResult:
        """Add the tokens of one round, in order, up to the one that ends the output.

        `finish_reason`: why the engine ends the output with the last token ("stop": a stop token, whose text is
        omitted).
        """
        start, last = self._num_released, len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            stop = self._push_one(token_id, finish_reason if i == last else None)
            if stop is not None:
                self._num_released = len(self._text)
                return StopResult(i + 1, self._text[start:], stop)
        if finish_reason is not None:
            self.flush()
        else:
            self._num_released = len(self._text) - self._num_uncertain()
        return StopResult(len(token_ids), self._text[start : self._num_released])

    def flush(self) -> str:
        """Release everything at once, for an output that has ended."""
        start = self._num_released
        if self._detokenizer is not None:
            self._text += self._detokenizer.flush()
        self._num_released = len(self._text)
        return self._text[start:]

    def _push_one(self, token_id: int, finish_reason: FinishReason | None) -> str | None:
        """Add a token; returns the stop string that it completes, if any. `finish_reason`: as in `push`, only for the
        last token."""
        self._num_tokens += 1
        before = len(self._text)
        if self._detokenizer is not None:
            if finish_reason != "stop" or self._params.include_stop_str_in_output:
                self._text += self._detokenizer.push(token_id)
            if finish_reason in ("stop", "length"):
                self._text += self._detokenizer.flush()
        if self._num_tokens <= self._params.min_tokens:
            self._num_exempt = len(self._text)
            return None
        grew = bool(self._stops) and len(self._text) > before
        return self._cut_at_stop_string(before) if grew else None

    def _cut_at_stop_string(self, before: int) -> str | None:
        """Find the stop string that ends first in the text from `before` on (ties: the first listed); cut the text."""
        before = max(before, self._num_exempt)
        first: tuple[int, str] | None = None
        for stop in self._stops:
            found = self._text.find(stop, max(0, before + 1 - len(stop)))
            if found >= 0 and (first is None or found + len(stop) < first[0]):
                first = (found + len(stop), stop)
        if first is None:
            return None
        end, stop = first
        self._text = self._text[: end if self._params.include_stop_str_in_output else end - len(stop)]
        return stop

    def _num_uncertain(self) -> int:
        """Number of characters at the end of the text that may begin a stop string."""
        if self._params.include_stop_str_in_output:
            return 0
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
