"""Grammars over token ids: compiled once, then matched along each output on the host. Built on llguidance.

A matcher advances by tokens of the output and by nothing else. Masks are a function of the output so far, and along
drafts of the drafts too; queries do not change the matcher.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from draftproof.grammar.sources import grammar_text, rule_of
from draftproof.types import StructuredOutputsParams

MOST_KEPT = 64  # compiled grammars; the least recently used is evicted
MOST_STATES = 50_000  # lexer states of a grammar, 1 to 2 KB each
WORD_BYTES = 4


class Matcher:
    """The position of one output in its grammar. `error`: why matching failed; empty if it did not."""

    def __init__(self, matcher: Any, executor: Any, sizes: tuple[int, int], after: int | None) -> None:
        """sizes: bytes of a mask, the model's and llguidance's; after: the grammar applies after this token; None: from
        the start.
        """
        self.error = ""
        self._matcher = matcher
        self._executor = executor
        self._row_bytes, self._own_bytes = sizes
        self._after = after

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        return self._after is None and not self.error and bool(self._matcher.is_accepting())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens of the output; the masks allowed them."""
        for number, token in enumerate(token_ids):
            if self._after is None:
                self._consume(token_ids[number:])
                return
            if token == self._after:
                self._after = None

    def masks(self, drafts: Sequence[int], num_rows: int) -> bytes:
        """Masks of `num_rows` rows, one bit per id: row j allows what may follow the output so far and the first j
        drafts.

        Masks after a ruled-out draft do not matter; they allow nothing.
        """
        if num_rows == 1 and self._after is None and not self.error:
            return self._next()
        rows = bytearray(num_rows * self._own_bytes)
        drafts, first = list(drafts[: num_rows - 1]), 0
        if self._after is not None:
            first = drafts.index(self._after) + 1 if self._after in drafts else num_rows
            rows[: first * self._own_bytes] = b"\xff" * (first * self._own_bytes)
            drafts = drafts[first:]
        if first < num_rows and not self.error:
            self._fill(rows, first, drafts)
        if self._own_bytes == self._row_bytes:
            return bytes(rows)
        starts = range(0, len(rows), self._own_bytes)
        return b"".join(rows[at : at + self._row_bytes] for at in starts)

    def _fill(self, rows: bytearray, first: int, drafts: list[int]) -> None:
        """Write masks for the rows from `first` on; each row but the last is followed by a draft.

        Masks along drafts come from a copy of the matcher: llguidance 1.9 still returns masks computed after tokens
        that were since rolled back. An error along the drafts counts as an error of the output only once the output
        reaches it.
        """
        size = self._own_bytes
        place = ctypes.addressof((ctypes.c_char * len(rows)).from_buffer(rows))
        if drafts:
            ahead, num_rows = self._matcher.deep_copy(), len(rows) // size
            work = [(ahead, first, drafts)]
            self._executor.unsafe_compute_mask_ptr_with_draft_token(work, place, size, num_rows)
            if not ahead.is_error():
                return
        ahead = self._matcher.deep_copy() if drafts else self._matcher
        for number, draft in enumerate([*drafts, None], first):
            ahead.unsafe_compute_mask_ptr(place + number * size, size)
            if ahead.is_error():
                rows[number * size :] = bytes(len(rows) - number * size)
                if number == first:
                    self._fail(ahead)
                return
            if draft is not None and ahead.try_consume_tokens([draft]) != 1:
                rows[(number + 1) * size :] = bytes(len(rows) - (number + 1) * size)
                return

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """Length of the longest prefix of `drafts` that may follow the output so far."""
        first = 0
        if self._after is not None:
            if self._after not in drafts:
                return len(drafts)
            first = list(drafts).index(self._after) + 1
        if self.error:
            return first
        return first + int(self._matcher.validate_tokens(list(drafts[first:])))

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that must come next."""
        if self._after is not None or self.error:
            return []
        return [int(token) for token in self._matcher.compute_ff_tokens()[:most]]

    def _consume(self, token_ids: Sequence[int]) -> None:
        if self.error:
            return
        taken = self._matcher.try_consume_tokens(list(token_ids))
        if taken == len(token_ids):
            return
        if self._matcher.is_error():
            self._fail(self._matcher)
        else:  # past the end there is only the end-of-text token, which llguidance does not consume
            assert self._matcher.is_stopped(), f"token {token_ids[taken]} of the output is not in its grammar"

    def _next(self) -> bytes:
        """The mask after the output so far. The most frequent query, so it uses the fewest calls."""
        row = bytes(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            self._fail(self._matcher)
            return bytes(self._row_bytes)
        return row[: self._row_bytes] if len(row) > self._row_bytes else row

    def _fail(self, matcher: Any) -> None:
        self.error = " ".join(str(matcher.get_error()).split())[:200]


class Grammar:
    """A compiled grammar, shared by any number of outputs."""

    def __init__(self, matcher: Any, executor: Any, sizes: tuple[int, int], after: int | None) -> None:
        self._parts = executor, sizes, after
        self._matcher = matcher

    def matcher(self) -> Matcher:
        """A matcher for a new output."""
        return Matcher(self._matcher.deep_copy(), *self._parts)


class GrammarCompiler:
    """Compiles structured-output rules for one tokenizer. Thread-safe; compilations run concurrently."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        eos_ids: Sequence[int],
        special_tokens: Callable[[], frozenset[str]],
    ) -> None:
        """tokenizer_json: the tokenizer in Hugging Face's format; vocab_size: the model's; eos_ids: ids that end an
        output; special_tokens: texts of the special tokens.
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = [token for token in eos_ids if 0 <= token < vocab_size]
        self._special_tokens = special_tokens
        self._tokenizer: Any = None
        self._executor: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, rule: StructuredOutputsParams) -> Grammar:
        """Compile `rule`. ValueError names the rule's field and why it cannot be followed."""
        tokenizer = self._load()
        name = f"structured_outputs: {rule_of(rule)}"
        try:
            text = grammar_text(rule, self._special_tokens())
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        except RecursionError:
            raise ValueError(f"{name}: is nested too deeply") from None
        with self._lock:
            matcher = self._compiled.get(text)
        if matcher is None:
            matcher = self._compile(tokenizer, text, name)
        with self._lock:
            self._compiled[text] = matcher
            self._compiled.move_to_end(text)
            if len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        sizes = _mask_bytes(self._vocab_size), _mask_bytes(tokenizer.vocab_size)
        return Grammar(matcher, self._executor, sizes, rule.after_token_id)

    def _compile(self, tokenizer: Any, text: str, name: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, max_lexer_states=MOST_STATES)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # this may find the grammar too large
        if matcher.is_error():
            why = " ".join(str(matcher.get_error()).split())[:300]
            raise ValueError(f"{name}: cannot be followed: {why}")
        return matcher

    def _load(self) -> Any:
        """llguidance's form of the tokenizer, made for the first grammar."""
        with self._lock:
            if self._tokenizer is None:
                if not self._eos_ids:
                    raise ValueError(
                        "structured_outputs: the model names no end-of-text token, so no output could end"
                    )
                self._tokenizer, self._executor = self._make()
            return self._tokenizer

    def _make(self) -> tuple[Any, Any]:
        try:
            from llguidance import LLExecutor, LLTokenizer
        except ImportError:
            raise ValueError(
                "structured_outputs: needs the package llguidance; pip install llguidance"
            ) from None
        file = self._tokenizer_json()
        try:
            tokenizer = LLTokenizer(file, eos_token=self._eos_ids)
            if tokenizer.vocab_size < self._vocab_size:
                tokenizer = LLTokenizer(file, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except Exception as error:
            raise ValueError(f"structured_outputs: the model's tokenizer cannot be used: {error}") from None
        return tokenizer, LLExecutor(1)


def _mask_bytes(vocab_size: int) -> int:
    return -(-vocab_size // 32) * WORD_BYTES
