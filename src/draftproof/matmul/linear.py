"""The exact planner: chooses the product for each number of rows so that a row's bits never depend on its batch.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftproof.matmul import cpu_planner, grouped, products
from draftproof.matmul.plan_cache import Cache, Choice, ReportRow
from draftproof.matmul.spec import Candidate, LinearFn, Shape, partial_sums
from draftproof.matmul.weights import KINDS, Dense, Weight
from draftproof.runtime import environment, gpu, native
from draftproof.runtime.room import Arena

FindCandidates = Callable[[torch.device, torch.dtype, torch.dtype, native.Library | None], list[Candidate]]


class PackedLinear:
    """x [T, K] -> x @ weight.T + bias [T, N], any T. Made by `LinearPlanner.pack`, usable after `certify`.

    `weight_itemsize`: bytes of a weight element as its kind stores it, scales not counted. `weight_bytes`: bytes that
    the product reads. `held_bytes`: change in memory held, relative to the weight as read. Both are known after
    certification. `kept`: the original weight stays in memory for another use.
    """

    def __init__(self, shape: Shape, weight_itemsize: int, *, kept: bool = False) -> None:
        self.shape = shape
        self.in_features = shape.inputs
        self.out_features = shape.outputs
        self.weight_itemsize = weight_itemsize
        self.weight_bytes = self.stored_bytes
        self.held_bytes = 0
        self.kept = kept
        self._linear_fn: LinearFn | None = None
        self._partial_sums: LinearFn | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weight as its kind stores it."""
        return self.weight_itemsize * self.in_features * self.out_features

    def use(self, linear_fn: LinearFn) -> None:
        """Set the function that multiplies."""
        self._linear_fn = linear_fn
        self._partial_sums = partial_sums(linear_fn)

    def __call__(self, x_TK: Tensor) -> Tensor:
        assert self._linear_fn is not None, "LinearPlanner.certify() was not called after pack()"
        return self._linear_fn(x_TK)

    def partial_sums(self, x_TK: Tensor) -> Tensor:
        """The product for `AddRMSNorm`, possibly as unreduced fp32 sums over segments of K: [T, N] or [S, T, N]."""
        assert self._partial_sums is not None, "LinearPlanner.certify() was not called after pack()"
        assert self.shape.out_dtype == self.shape.dtype, "the norm rounds to the dtype of the stream"
        return self._partial_sums(x_TK)


class LinearPlanner:
    """Packs weights, and finds for each shape the fastest candidate that gives a row the same bits in any batch.

    One candidate is kept per weight, so a weight is in memory once. Certificates apply to the number of threads that
    they were made with; the reference runs at one thread, so they agree between processes. `exact=False`: no
    certificates; uses the candidate expected to be fastest, at any number of rows. `cache_dir` None:
    `native.default_cache_dir()`. `thorough`: certify every candidate, for a report, ignoring certificates on disk.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        exact: bool,
        max_rows: int,
        library: native.Library | None,
        cache_dir: Path | None = None,
        progress: native.Progress | None = None,
        find_candidates: FindCandidates = products.candidates,
        thorough: bool = False,
    ) -> None:
        self.exact = exact
        self._thorough = thorough
        self.max_rows = max_rows
        self._device = device
        self._library = library
        self._progress = progress
        self._find_candidates = find_candidates
        self._folder = cache_dir or native.default_cache_dir()
        self.weight_bytes = 0  # total bytes read for the models whose products are packed here
        self._pending: list[tuple[PackedLinear, Weight, Tensor | None]] = []
        self._choices: dict[Shape, Choice] = {}
        self._arena = Arena()
        self._packed: list[PackedLinear] = []
        self._equal_groups: dict[int, grouped.EqualGroups] = {}
        self._grouped: dict[Shape, bool] = {}  # whether each shape's grouped product is exact

    def pack(
        self,
        weight: Tensor | Weight,
        bias_N: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        exact: bool | None = None,
        kept: bool = False,
    ) -> PackedLinear:
        """The product with `weight`, a tensor [N, K] or a `Weight`. The caller drops the original, unless it is `kept`.

        `exact` None: the planner's setting. `out_dtype` other than the weight's: converted straight from the
        accumulator, never rounded to the weight's dtype.
        """
        weight = Dense(weight.detach()) if isinstance(weight, Tensor) else weight
        bias_N = None if bias_N is None else bias_N.detach()
        shape = Shape(*weight.size, weight.dtype, out_dtype or weight.dtype, bias_N is not None, weight.kind)
        kind = KINDS[weight.kind]
        linear = PackedLinear(shape, kind.itemsize(self._device, weight.dtype), kept=kept)
        self._packed.append(linear)
        if self.exact if exact is None else exact:
            assert kind.exact, (
                f"products with {weight.kind} weights are for drafters: they have no certificates"
            )
            self._pending.append((linear, weight, bias_N))
        else:
            # The first candidate is the fastest on a CPU; on a GPU it is the reference, and the last is the library's.
            candidate = self._candidates(shape)[-1 if gpu.available(self._device) else 0]
            self._use(linear, candidate.make(weight.parts, bias_N, shape.out_dtype))
        return linear

    def pack_experts(
        self,
        num_experts: int,
        weights: Iterable[Tensor],
        *,
        out_dtype: torch.dtype | None = None,
        exact: bool | None = None,
    ) -> grouped.GroupedLinear:
        """The products with each expert's weight [N, K], taken one by one. Usable after `certify`.

        If no grouped product is exact here, each expert has a product from `pack`.
        """
        exact = self.exact if exact is None else exact
        rest = iter(weights)
        first_NK = next(rest)
        weights = itertools.chain([first_NK], rest)
        dtype = first_NK.dtype
        shape = Shape(first_NK.shape[0], first_NK.shape[1], dtype, out_dtype or dtype, False)
        make = grouped.find(self._device, shape, self._library)
        if make is not None and exact and shape not in self._grouped:
            self._grouped[shape] = grouped.is_exact(make, shape, self._device)
        if make is not None and (not exact or self._grouped[shape]):
            return make(num_experts, weights, shape)
        each = [self.pack(weight_NK, out_dtype=shape.out_dtype, exact=exact) for weight_NK in weights]
        assert len(each) == num_experts
        return grouped.PerExpert(each, shape)

    def equal_groups(self, num: int) -> grouped.EqualGroups:
        """Starts of `num` groups with equal numbers of rows, for `pack_experts`' products."""
        if num not in self._equal_groups:
            self._equal_groups[num] = grouped.EqualGroups(num, self.max_rows, self._device)
        return self._equal_groups[num]

    def certify(self) -> None:
        """Choose a candidate for every shape packed so far, from the disk cache if known, and pack the weights.

        Raises NoPowerError if the test data would not expose a changed order.
        """
        wanted = list(dict.fromkeys(linear.shape for linear, _, _ in self._pending))
        here = environment.key(self._device, self._library)
        cache = Cache(self._folder / f"certificates-{here}.json")
        known = {} if self._thorough else cache.read()
        self._choices.update({s: known[s.key()] for s in wanted if self._can_follow(s, known.get(s.key()))})
        missing = [shape for shape in wanted if shape not in self._choices]
        for number, shape in enumerate(missing):
            self._tell("certifying products, once for this machine", number, len(missing))
            self._choices[shape] = self._choose(shape)
        if missing:
            self._tell("certifying products, once for this machine", len(missing), len(missing))
            cache.write({shape.key(): choice for shape, choice in self._choices.items()})
        self._warn_if_slow(wanted)
        self._pending.reverse()
        while self._pending:  # popped one by one: an original is freed as soon as its packed form exists
            linear, weight, bias_N = self._pending.pop()
            self._use(linear, self._make(linear.shape, weight, bias_N))

    def _use(self, linear: PackedLinear, linear_fn: LinearFn) -> None:
        num_packed = products.packed_bytes(linear_fn)
        if num_packed is not None:
            linear.weight_bytes = num_packed
            linear.held_bytes = num_packed - (0 if linear.kept else linear.stored_bytes)
        products.settle(linear_fn, self._arena)
        linear.use(linear_fn)

    @property
    def num_packed(self) -> int:
        """Number of weights packed so far."""
        return len(self._packed)

    def packed(self, first: int, end: int) -> Sequence[PackedLinear]:
        """Products `first` to `end`, in the order of packing."""
        return self._packed[first:end]

    @property
    def choices(self) -> Mapping[Shape, Choice]:
        """The decision for each shape."""
        return self._choices

    @property
    def grouped_shapes(self) -> Mapping[Shape, bool]:
        """Shapes of experts' products, and whether one call for all experts is exact."""
        return self._grouped

    def report(self) -> list[ReportRow]:
        """The choice and the cost of exactness, one line per shape and timed number of rows."""
        return [row for choice in self._choices.values() for row in choice.report]

    def _candidates(self, shape: Shape) -> list[Candidate]:
        """The candidates that take weights of the shape's kind."""
        dense = self._find_candidates(self._device, shape.dtype, shape.out_dtype, self._library)
        own = KINDS[shape.kind].candidates(self._device, dense)
        return [candidate for candidate in (*dense, *own) if shape.kind in candidate.takes]

    def _can_follow(self, shape: Shape, choice: Choice | None) -> bool:
        """Whether a choice read from disk is possible here."""
        if choice is None:
            return False
        if choice.by_bucket:
            return {*choice.by_bucket} - {""} <= {candidate.name for candidate in self._candidates(shape)}
        return any(
            candidate.name == choice.candidate and (candidate.any_rows or choice.buckets)
            for candidate in self._choosable(shape)
        )

    def _make(self, shape: Shape, weight: Weight, bias_N: Tensor | None) -> LinearFn:
        choice = self._choices[shape]
        if choice.by_bucket:
            from draftproof.matmul import gpu_planner as planner

            candidates, chosen = self._candidates(shape), choice.by_bucket
            return planner.make(candidates, choice.buckets, chosen, weight.parts, bias_N, shape.out_dtype)
        candidate = next(
            candidate for candidate in self._choosable(shape) if candidate.name == choice.candidate
        )
        return cpu_planner.planned(
            candidate, candidate.make(weight.parts, bias_N, shape.out_dtype), choice.buckets
        )

    def _choose(self, shape: Shape) -> Choice:
        """Certify and time the candidates of a shape."""
        candidates = self._candidates(shape)
        if gpu.available(self._device):
            from draftproof.matmul import gpu_planner as planner

            return planner.plan(shape, candidates, self.max_rows, self._device)
        return cpu_planner.plan(shape, candidates, thorough=self._thorough)

    def _choosable(self, shape: Shape) -> list[Candidate]:
        """The candidates that a choice may name, fallbacks included."""
        candidates = self._candidates(shape)
        if gpu.available(self._device):
            return [*candidates, *([products.SLOW] if shape.kind in products.SLOW.takes else [])]
        return [*candidates, *cpu_planner.fallbacks(candidates[0])]

    def _warn_if_slow(self, shapes: Sequence[Shape]) -> None:
        slow = [shape for shape in shapes if self._choices[shape].candidate == products.SLOW.name]
        if slow:
            cost = max((row.cost for shape in slow for row in self._choices[shape].report), default=0.0)
            warnings.warn(
                f"no fast product is exact on this machine for {', '.join(s.key() for s in slow)}: running row by row, "
                f"up to {1 + cost:.0f} times slower; exact=False takes the fast product and gives up the promise",
                stacklevel=3,
            )

    def _tell(self, what: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(what, done, total)
