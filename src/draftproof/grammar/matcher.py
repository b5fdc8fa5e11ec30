"""Grammars over token ids: compiled once, and matched along each output on the host. Built on llguidance.

A matcher moves by the tokens that stand in the output and by nothing else. What the next tokens may be is a function of
them, and along drafts of the drafts too; asking changes nothing.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from draftproof.grammar.sources import grammar_text, rule_of
from draftproof.types import StructuredOutputsParams

MOST_KEPT = 64  # compiled grammars, the least recently used one goes
MOST_STATES = 50_000  # of a grammar's lexer, 1 to 2 KB each
WORD_BYTES = 4


class Matcher:
    """How far one output has come in its grammar. `error`: why nothing more can be said of it."""

    def __init__(self, matcher: Any, executor: Any, sizes: tuple[int, int], after: int | None) -> None:
        """sizes: bytes of a mask, the model's and llguidance's; after: the grammar holds after this token, None: from
        the start."""
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
        """Take in tokens of the output, which the masks allowed."""
        for number, token in enumerate(token_ids):
            if self._after is None:
                self._consume(token_ids[number:])
                return
            if token == self._after:
                self._after = None

    def masks(self, drafts: Sequence[int], num_rows: int) -> bytes:
        """A mask for each of so many rows, a bit an id: what may follow the output so far and the first j drafts. What
        follows a draft that is itself ruled out does not matter, and nothing is allowed there."""
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
        """Masks of the rows from `first` on, of which each but the last is followed by a draft.

        Along drafts they are found by a copy: what llguidance 1.9 has found behind tokens it still answers after it
        took them back. An error on the way is one of the output only once it has come so far.
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
        """How many of these may follow the output so far, one after the other."""
        first = 0
        if self._after is not None:
            if self._after not in drafts:
                return len(drafts)
            first = list(drafts).index(self._after) + 1
        if self.error:
            return first
        return first + int(self._matcher.validate_tokens(list(drafts[first:])))

    def forced(self, most: int) -> list[int]:
        """At most so many tokens that must come next."""
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
        else:  # beyond its end there is only the end-of-text token, which is not taken
            assert self._matcher.is_stopped(), f"token {token_ids[taken]} of the output is not in its grammar"

    def _next(self) -> bytes:
        """The mask behind the output so far: what is asked for most, so with the fewest calls."""
        row = bytes(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            self._fail(self._matcher)
            return bytes(self._row_bytes)
        return row[: self._row_bytes] if len(row) > self._row_bytes else row

    def _fail(self, matcher: Any) -> None:
        self.error = " ".join(str(matcher.get_error()).split())[:200]


class Grammar:
    """A compiled grammar: any number of outputs may follow it at once."""

    def __init__(self, matcher: Any, executor: Any, sizes: tuple[int, int], after: int | None) -> None:
        self._parts = executor, sizes, after
        self._matcher = matcher

    def matcher(self) -> Matcher:
        """The matcher of an output that begins."""
        return Matcher(self._matcher.deep_copy(), *self._parts)


class GrammarCompiler:
    """Compiles what outputs must be, for one tokenizer. Any thread may call it; others run meanwhile."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        eos_ids: Sequence[int],
        special_tokens: Callable[[], frozenset[str]],
    ) -> None:
        """tokenizer_json: the tokenizer as Hugging Face's file has it; vocab_size: the model's; eos_ids: what ends an
        output; special_tokens: texts of tokens that are no text."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = [token for token in eos_ids if 0 <= token < vocab_size]
        self._special_tokens = special_tokens
        self._tokenizer: Any = None
        self._executor: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, rule: StructuredOutputsParams) -> Grammar:
        """ValueError names the rule's field and why it cannot be followed."""
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
            matcher.compute_bitmask()  # which may find it too large
        if matcher.is_error():
            why = " ".join(str(matcher.get_error()).split())[:300]
            raise ValueError(f"{name}: cannot be followed: {why}")
        return matcher

    def _load(self) -> Any:
        """llguidance's form of the tokenizer, made when the first grammar comes."""
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
