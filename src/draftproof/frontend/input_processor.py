"""Converts a user's prompt and parameters to the engine's input: checked ids and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from draftproof.engine.checks import check_request
from draftproof.engine.interface import Item, RequestSpec
from draftproof.engine.items import EMBEDS, ItemInput, ItemStore, num_ahead
from draftproof.frontend.images import IMAGE, VIDEO, ImageReader
from draftproof.frontend.text import Tokenizer
from draftproof.frontend.videos import VideoReader
from draftproof.grammar.matcher import Grammar, GrammarCompiler
from draftproof.models.config import ModelConfig
from draftproof.models.loading import GenerationDefaults
from draftproof.sampling.noise import row_seed
from draftproof.schema import check_choice, check_whole, shown
from draftproof.types import RequestHints, SamplingParams

DictPrompt = dict[str, Any]
Prompt = str | list[int] | DictPrompt
NO_HINTS = RequestHints()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked copy of a prompt and its parameters; later changes by the caller have no effect.

    `members`, `bad_words_ids`, `grammar` and `items`: as in `RequestSpec`.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    hints: RequestHints = NO_HINTS
    members: tuple[int, ...] = ()
    bad_words_ids: list[list[int]] = field(default_factory=list)
    grammar: Grammar | None = None
    items: tuple[Item, ...] = ()
    inputs: tuple[
        ItemInput, ...
    ] = ()  # the items' inputs, which the engine keeps as long as this object refers to them


class InputProcessor:
    """Checks and encodes requests. Has no mutable state: any thread may call it."""

    def __init__(
        self,
        model: ModelConfig,
        max_model_len: int,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        engine_seed: int,
        methods: Sequence[str] = (),
        store: ItemStore | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """`methods`: of the engine's drafter, or of its chain's members; `store`: the engine's, None: only token
        prompts; `images`: None for a model without image input."""
        self.images = images
        self._store = store
        self.tokenizer = tokenizer
        self._model = model
        self._max_model_len = max_model_len
        self._defaults = defaults
        self._engine_seed = engine_seed
        self.methods = tuple(methods)
        self._compiler: GrammarCompiler | None = None
        if tokenizer is not None:
            self._compiler = GrammarCompiler(
                tokenizer.to_json, model.vocab_size, self.eos_ids, tokenizer.special_texts
            )

    def prepare(
        self, prompt: Prompt, params: SamplingParams, hints: RequestHints = NO_HINTS
    ) -> PreparedRequest:
        """The checked request; ValueError if it cannot be served."""
        encoded = self._encode(prompt)
        params = replace(params)  # which copies its lists and checks them again
        if self.tokenizer is None and (params.bad_words or params.stop_strings):
            raise ValueError("stop, bad_words: need a tokenizer; this model has none, give tokenizer=...")
        members = self._members(hints.method)
        prepared = PreparedRequest(
            encoded.text,
            encoded.token_ids,
            params,
            hints,
            members,
            self._bad_words(params),
            self.grammar(params),
            encoded.items,
            encoded.inputs,
        )
        if encoded.has_no_tokens:
            _check_without_tokens(params)
        check_request(self.spec(prepared, 0), self._model.vocab_size, self._max_model_len)
        return prepared

    def spec(self, given: PreparedRequest, arrival: int, index: int = 0) -> RequestSpec:
        """The engine's spec of choice `index` of a request, the engine's `arrival`-th."""
        token_ids, params = given.prompt_token_ids, given.params
        # rotary positions may be ahead of the number of tokens, and the limit applies to both
        room = self._max_model_len - len(token_ids) - num_ahead(given.items, given.inputs)
        scores_prompt = params.prompt_logprobs is not None
        return RequestSpec(
            token_ids=token_ids,  # one list object for all choices, by which the scheduler identifies them
            params=params,
            row_seed=row_seed(params.seed, self._engine_seed, arrival, index),
            limit=len(token_ids) + min(room, params.max_tokens or room),
            eos_ids=self._ends(params),
            stop_ids=self._stop_ids(params),
            bad_words_ids=given.bad_words_ids,
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            most_drafts=given.hints.num_speculative_tokens,
            members=given.members,
            priority=given.hints.priority,
            grammar=given.grammar,
            reads_prefix_cache=not scores_prompt,
            items=given.items,
        )

    def draft_spec(self, token_ids: list[int]) -> RequestSpec:
        """A request that is only drafted for, never sampled: every row is computed. Raises ValueError as `prepare`."""
        given = self.prepare({"prompt_token_ids": token_ids}, SamplingParams(temperature=0, max_tokens=None))
        return replace(self.spec(given, -1), reads_prefix_cache=False)

    def _encode(self, prompt: Prompt) -> Encoded:
        if isinstance(prompt, dict):
            given: dict[str, Any] = {**prompt}
            if "prompt_embeds" in given:
                return self._embeds(given)
            if "multi_modal_data" in given:
                return self._with_images(given)
            text, ids = given.get("prompt"), as_lists(given.get("prompt_token_ids"))
            if len(given) != 1 or not (isinstance(text, str) or isinstance(ids, (list, tuple))):
                raise ValueError(
                    f"prompt={prompt!r:.80}: a dict must hold 'prompt', a text, or 'prompt_token_ids', a list of ids, "
                    "or 'prompt_embeds', a tensor [rows, hidden], and nothing else but 'multi_modal_data'"
                )
            return self._encode(list(ids) if text is None else text)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "prompt: is text, but the model has no tokenizer; give token ids, or tokenizer=..."
                )
            return Encoded(prompt, self.tokenizer.encode(prompt))
        if isinstance(prompt, (list, tuple)):
            return Encoded(None, list(prompt))
        raise ValueError(
            f"prompt={prompt!r:.80}: must be text, a list of token ids or {{'prompt_token_ids': [...]}}"
        )

    def _with_images(self, given: dict[str, Any]) -> Encoded:
        """A text or ids with images for its placeholders."""
        data = given.pop("multi_modal_data") or {}
        if self.images is None:
            raise ValueError("multi_modal_data: this model reads no images; leave it out")
        if not isinstance(data, dict) or data.keys() - {IMAGE, VIDEO}:
            raise ValueError(
                f"multi_modal_data={shown(data)}: must be {{'image': image or list of images, 'video': frames}}"
            )
        text = given.get("prompt")
        if isinstance(text, str) and self.tokenizer is not None:
            given["prompt"] = self.images.marked(text, self.tokenizer)
        plain = self._encode(given)
        images = self.images.read(data.get(IMAGE, []))
        videos = VideoReader(self.images, self.tokenizer).read(data.get(VIDEO, []))
        token_ids, items, inputs = self.images.place(plain.token_ids, images, videos, self.tokenizer)
        ahead = num_ahead(items, inputs)
        if ahead and (last := len(token_ids) + ahead) >= self._max_model_len:
            raise ValueError(
                f"multi_modal_data: the answer stands at position {last}, at most max_model_len={self._max_model_len} "
                "are there; leave images or frames out, or say that frames follow each other sooner"
            )
        return Encoded(plain.text, token_ids, items, inputs)

    def _embeds(self, given: dict[str, Any]) -> Encoded:
        """A prompt of embeddings instead of tokens; its ids are zeros."""
        embeds = torch.as_tensor(given["prompt_embeds"])
        wanted = self._model.hidden_size
        if len(given) != 1 or self._store is None:
            raise ValueError("prompt_embeds: goes alone; leave the prompt's other keys out")
        if embeds.ndim != 2 or embeds.shape[1] != wanted or not embeds.is_floating_point() or not len(embeds):
            raise ValueError(
                f"prompt_embeds: {embeds.dtype} of shape {tuple(embeds.shape)}: must be floats [rows, {wanted}], what "
                "the model's input embedding gives"
            )
        embeds = embeds.detach().cpu().clone()
        if not bool(embeds.isfinite().all()):
            raise ValueError("prompt_embeds: holds values that are no finite numbers")
        num_rows = len(embeds)
        if num_rows >= self._max_model_len:
            raise ValueError(
                f"prompt_embeds: {num_rows} rows leave no room for an answer in max_model_len={self._max_model_len}; "
                "shorten them or raise max_model_len"
            )
        held = self._store.hold(ItemInput.of(EMBEDS, {EMBEDS: embeds}, num_rows))
        return Encoded(None, [0] * num_rows, (Item(held.content, 0, num_rows),), (held,), has_no_tokens=True)

    def _members(self, method: str | None) -> tuple[int, ...]:
        """Indices of the chain's members with this method; empty: all members."""
        if method is None:
            return ()
        if not self.methods:
            raise ValueError(f"method={shown(method)}: this engine has no drafter; leave it out")
        check_choice("method", method, self.methods)
        named = tuple(number for number, own in enumerate(self.methods) if own == method)
        return () if len(named) == len(self.methods) else named

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Ids that end an output, and that min_tokens suppresses."""
        return frozenset(params.stop_token_ids or ()) | self._ends(params)

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        """End-of-text ids that end an output. With a grammar they always do, since nothing can follow its end."""
        goes_on = params.ignore_eos and params.structured_outputs is None
        return frozenset(() if goes_on else self.eos_ids)

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """The compiled grammar that an output must follow, cached; None without one. ValueError if it is invalid."""
        rule = params.structured_outputs
        if rule is None:
            return None
        if self._compiler is None:
            raise ValueError("structured_outputs: need a tokenizer; this model has none, give tokenizer=...")
        if rule.after_token_id is not None:
            check_whole(
                "structured_outputs: after_token_id", rule.after_token_id, 0, self._model.vocab_size - 1
            )
        return self._compiler.compile(rule)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """End-of-text ids: the generation config's, else the model's, else the tokenizer's."""
        own = None if self.tokenizer is None else self.tokenizer.eos_token_id
        fallback = () if own is None else (own,)
        return self._defaults.eos_token_ids or self._model.eos_token_ids or fallback

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word encoded as at the start of a text and as after a space."""
        found: list[list[int]] = []
        for word in params.bad_words or ():
            assert self.tokenizer is not None
            for text in (word, f" {word.lstrip()}"):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as ids, and the items that replace some of them. `has_no_tokens`: the ids are only placeholders."""

    text: str | None
    token_ids: list[int]
    items: tuple[Item, ...] = ()
    inputs: tuple[ItemInput, ...] = ()
    has_no_tokens: bool = False


def _check_without_tokens(params: SamplingParams) -> None:
    if params.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs: a prompt of embeddings has no tokens to score; leave it out")
    if params.repetition_penalty != 1:
        raise ValueError(
            f"repetition_penalty={params.repetition_penalty}: counts the prompt's tokens, and one of embeddings has "
            "none; leave it out"
        )


def as_lists(value: Any) -> Any:
    """`value`; an array or a tensor as lists of Python numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """The SamplingParams of each prompt: one for all, or a list."""
    if isinstance(params, SamplingParams):
        return [params] * count
    listed: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params]
    if not all(isinstance(p, SamplingParams) for p in listed):
        raise ValueError(
            f"sampling_params={params!r:.80}: must be one SamplingParams, or a list with one each"
        )
    if len(listed) != count:
        raise ValueError(f"sampling_params: {len(listed)} given for {count} prompts; give one, or one each")
    return listed
