"""Validation of every `RequestSpec` before it is queued, whatever front end made it."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.engine.interface import Item, RequestSpec
from draftproof.schema import MOST, check_whole, is_whole, shown
from draftproof.types import MOST_LOGPROBS, SamplingParams


def check_request(spec: RequestSpec, vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError, naming field, value and fix, for a request that no step could compute."""
    params = spec.params
    _check_prompt(spec.token_ids, vocab_size, max_model_len)
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params={shown(params)}: must be a SamplingParams")
    check_whole("limit", spec.limit, len(spec.token_ids) + 1, max_model_len)
    check_whole("row_seed", spec.row_seed, -(1 << 63), (1 << 63) - 1)
    for name, ids in (("eos_ids", spec.eos_ids), ("stop_ids", spec.stop_ids)):
        if not isinstance(ids, (set, frozenset)) or not all(map(is_whole, ids)):
            raise ValueError(f"{name}={shown(ids)}: must be a frozenset of token ids")
    for word in spec.bad_words_ids:
        if not word or not _all_within(word, vocab_size):
            raise ValueError(f"bad_words: {shown(word)}: must be token ids from 0 to {vocab_size - 1}")
    if spec.most_drafts is not None:
        check_whole("num_speculative_tokens", spec.most_drafts, 0)
    check_whole("priority", spec.priority, -MOST, MOST)
    if (params.structured_outputs is None) != (spec.grammar is None):
        raise ValueError(
            "structured_outputs: goes with a grammar, compiled from it (GrammarCompiler); give both or none"
        )
    if spec.prompt_logprobs is not None:
        check_whole("prompt_logprobs", spec.prompt_logprobs, 0, MOST_LOGPROBS)
        if spec.reads_prefix_cache:
            raise ValueError(
                "reads_prefix_cache=True: prompt_logprobs need every prompt row; set it to False"
            )
    _check_items(spec.items, len(spec.token_ids))
    _check_token_ids(params, vocab_size)
    _check_possible(spec, vocab_size)


def _check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    if not isinstance(token_ids, (list, tuple)):
        raise ValueError(f"prompt={shown(token_ids)}: must be a list of token ids")
    if not token_ids:
        raise ValueError("prompt: is empty; give at least one token")
    if not _all_within(token_ids, vocab_size):
        position, token = next((i, t) for i, t in enumerate(token_ids) if not is_whole(t, 0, vocab_size - 1))
        raise ValueError(
            f"prompt: token id {shown(token)} at position {position}: ids go from 0 to {vocab_size - 1}"
        )
    if len(token_ids) >= max_model_len:
        raise ValueError(
            f"prompt: {len(token_ids)} tokens leave no room for an answer in max_model_len={max_model_len}; shorten "
            "the prompt or raise max_model_len"
        )


def _check_items(items: Sequence[Item], num_prompt: int) -> None:
    end = 0
    for item in items:
        if item.num_rows < 1 or item.start < end or item.start + item.num_rows > num_prompt:
            raise ValueError(
                f"items: rows {item.start} to {item.start + item.num_rows - 1}: must lie in the prompt of {num_prompt} "
                "tokens, in order and apart"
            )
        end = item.start + item.num_rows


def _all_within(ids: Sequence[int], vocab_size: int) -> bool:
    """Whether all are ids of the vocabulary."""
    if set(map(type, ids)) == {int}:  # ten times faster on a long prompt
        return min(ids) >= 0 and max(ids) < vocab_size
    return all(is_whole(token, 0, vocab_size - 1) for token in ids)


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError if `allowed_token_ids` or `logit_bias` do not fit this vocabulary."""
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise ValueError("allowed_token_ids=[]: must name at least one id; leave it out to allow all")
    for name, ids in (("allowed_token_ids", params.allowed_token_ids), ("logit_bias", params.logit_bias)):
        for token in ids or ():
            if not is_whole(token, 0, vocab_size - 1):
                raise ValueError(
                    f"{name}: id {token!r} is not in the vocabulary: ids go from 0 to {vocab_size - 1}"
                )


def _check_possible(spec: RequestSpec, vocab_size: int) -> None:
    """Raise ValueError if a request rules out every token as its first output. Bad words of several tokens are not
    considered: they ban a token only after the others."""
    params, stop_ids = spec.params, spec.stop_ids
    ruled_out = {word[0] for word in spec.bad_words_ids if len(word) == 1}
    if params.min_tokens:
        ruled_out |= stop_ids
    allowed = params.allowed_token_ids
    if allowed is None and len(ruled_out) < vocab_size:
        return
    if any(token not in ruled_out for token in (range(vocab_size) if allowed is None else allowed)):
        return
    reasons = []
    if params.min_tokens and stop_ids:
        reasons.append(f"min_tokens={params.min_tokens} holds back stop ids {sorted(stop_ids)!r:.60}")
    if spec.bad_words_ids:
        reasons.append(f"bad_words={params.bad_words!r:.60} are ruled out")
    raise ValueError(
        f"allowed_token_ids={allowed!r:.80}: no token is left, since {' and '.join(reasons)}; allow another id, or ask "
        "for less"
    )
