"""Ids and logprobs with every drafter against plain decoding, bit for bit, in bf16.

    PYTHONPATH=src:. python tests/gpu/exactness.py --models DIR --stages tiny-eagle3,small-ngram --jobs 8

The reference is plain decoding one request at a time, without a prefix cache. Against it: batches of 1, 8 and 64, a
mixture of every kind of request, few KV blocks, a second run that finds its prompts in the prefix cache; each greedy
and sampled, with graphs and without.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.models import DUMMY, SHAPES_OF
from draftproof import LLM, RequestOutput, SamplingParams
from draftproof.bench.compare import Tally, compare
from draftproof.bench.harness import free_memory
from draftproof.bench.stages import CheckLog, describe, parser, run_stages
from draftproof.cli.verify import failures, seeded
from tests.conformance.cases import CASES, TARGETS
from tests.gpu.settings import Models, num_graphs, run_apart, token_prompts

PLAIN = "plain"
NOT_OURS = ("custom", "replay")  # proposals of the first depend on chance; the second has a stage of its own
METHODS = {
    "tiny": (PLAIN, *(name for name, case in CASES.items() if name not in NOT_OURS and not case.own_target)),
    **{
        name: (PLAIN, *(method for method, case in CASES.items() if case.own_target is make))
        for name, make in TARGETS.items()
    },
    "small": (PLAIN, "ngram", "eagle3", "draft_model"),
    # a random head's drafts are all rejected; replay's are right four times in five, at the head's cost
    DUMMY: (PLAIN, "eagle3", "replay"),
    "moe": (PLAIN, "replay"),
}
HEADS = {DUMMY: "eagle3"}  # the head whose cost replay has; for other models it has none
STAGES = {f"{model}-{method}": (model, method) for model, methods in METHODS.items() for method in methods}
MODES = {"graphs": False, "eager": True}  # enforce_eager
WORKLOADS = ("greedy", "sampled", "mixed")
RATE = 0.8


@dataclass(frozen=True)
class Scale:
    """How much is run. `alone_eager`: number of prompts for batch 1 without graphs, which is slow."""

    prompts: int = 64
    tokens: int = 128
    longest: int = 160
    alone: int = 64
    alone_eager: int = 16

    @property
    def max_model_len(self) -> int:
        return -(-(self.longest + self.tokens) // 16) * 16

    @property
    def few_blocks(self) -> int:
        """Number of blocks for an eighth of the requests at full length, and at least for one and a half."""
        longest = self.max_model_len // 16
        return 1 + max(longest * 3 // 2, longest * self.prompts // 8)


def scale_of(model: str, quick: bool) -> Scale:
    if quick:
        return Scale(prompts=6, tokens=32, longest=40, alone=2, alone_eager=1)
    return Scale(prompts=8, tokens=64, alone=8, alone_eager=8) if model in SHAPES_OF else Scale()


@dataclass(frozen=True)
class Setting:
    """How a workload is run: `group` requests are submitted at once (None: all), `runs` times."""

    name: str
    workloads: tuple[str, ...] = ("greedy", "sampled")
    group: int | None = None
    fill: int = 0  # requests are repeated up to this number
    runs: int = 1
    preempts: bool = False


UNSHARED: dict[str, Any] = {"enable_prefix_caching": False}
ENGINES: tuple[tuple[dict[str, Any], tuple[Setting, ...]], ...] = (
    (
        {**UNSHARED, "max_num_seqs": 64},
        (Setting("batch 1", group=1), Setting("batch 64", fill=64), Setting("mixed", ("mixed",))),
    ),
    ({**UNSHARED, "max_num_seqs": 8}, (Setting("batch 8"),)),
    ({"max_num_seqs": 64, "few": True}, (Setting("preempted", WORKLOADS, fill=24, preempts=True),)),
    ({"max_num_seqs": 64}, (Setting("prefix-cached", runs=2),)),
)


@dataclass(frozen=True)
class Requests:
    prompts: list[list[int]]
    params: list[SamplingParams]

    def run(self, llm: LLM, group: int | None = None) -> list[RequestOutput]:
        size = group or len(self.prompts)
        found: list[RequestOutput] = []
        for i in range(0, len(self.prompts), size):
            prompts: list[Any] = [{"prompt_token_ids": p} for p in self.prompts[i : i + size]]
            found += llm.generate(prompts, self.params[i : i + size], use_tqdm=False)
        return found


def workload(name: str, llm: LLM, scale: Scale) -> Requests:
    """A workload's requests. Workloads share no prompts, so that a replayed text belongs to one of them."""
    base = SamplingParams(max_tokens=scale.tokens, ignore_eos=True, logprobs=1)
    prompts = [p[WORKLOADS.index(name) :] for p in token_prompts(llm, scale.prompts, scale.longest)]
    if name == "mixed":
        return Requests(prompts, mixture(scale, text=llm.has_tokenizer))
    return Requests(prompts, seeded(base, 0.0 if name == "greedy" else 0.8, scale.prompts))


def mixture(scale: Scale, *, text: bool) -> list[SamplingParams]:
    """Parameters with every kind of logits processing, stopping and log-probabilities, and various lengths. `text`:
    include those that need a tokenizer."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "logprobs": 0, "prompt_logprobs": 1},
        {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "logprobs": 1},
        {"temperature": 0.6, "n": 2, "logprobs": 1},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 2},
        {"temperature": 0.5, "frequency_penalty": 0.8, "logprobs": 1},
        {"temperature": 0, "logit_bias": {198: 2.5, 10: -5.0}, "logprobs": 1},
        {"temperature": 0, "min_tokens": 5, "stop_token_ids": [203, 198, 300], "logprobs": 1},
        {"temperature": 0, "ignore_eos": True, "logprobs": 1},
        {"temperature": 0.9, "allowed_token_ids": list(range(200, 700)), "logprobs": 1},
    ]
    if text:
        kinds += [
            {"temperature": 0, "stop": ["\n\n", "):"], "logprobs": 1},
            {"temperature": 0, "bad_words": ["self", "import"], "logprobs": 1},
        ]
    if text and find_spec("llguidance"):
        kinds += [
            {"temperature": 0.8, "structured_outputs": {"json_object": True}, "logprobs": 1},
            {"temperature": 0, "structured_outputs": {"regex": "([a-z]{1,5} ){3,}[0-9]+"}, "logprobs": 1},
        ]
    found = []
    for i in range(scale.prompts):
        length = scale.tokens if i % 2 else max(5, 37 * i % scale.tokens)
        found.append(SamplingParams(max_tokens=length, seed=i, **kinds[i % len(kinds)]))
    return found


@dataclass
class Exactness:
    """Runs the stages; a model's reference is computed once."""

    models: Models
    log: CheckLog
    modes: Sequence[str]
    settings: dict[str, Sequence[str]]  # each mode's
    _known: dict[str, dict[str, tuple[Requests, list[RequestOutput]]]] = field(default_factory=dict)

    def stage(self, model: str, method: str) -> None:
        scale = scale_of(model, self.models.quick)
        expected = self.reference(model, scale)
        drafting = None if method == PLAIN else self.drafting(model, method, expected)
        for mode in self.modes:
            tallies = {name: Tally() for name in WORKLOADS}
            for engine, settings in ENGINES:
                settings = tuple(s for s in settings if s.name in self.settings[mode])
                if not settings:
                    continue
                name = f"{model}-{method} {mode}"
                with self.log.guard(f"{name} {settings[0].name}"):
                    llm = self.engine(model, scale, engine, drafting, mode)
                    for setting in settings:
                        for work in setting.workloads:
                            self.check(name, llm, setting, work, expected[work], tallies[work])
                    self.check_graphs(f"{name} {settings[0].name}", llm, mode)
                    del llm
                free_memory()
            if drafting is not None:
                wanted = model not in SHAPES_OF or method == "replay"
                s = {work: tally.speculation for work, tally in tallies.items()}
                detail = ", ".join(
                    f"{work} {t.num_accepted_tokens} of {t.num_draft_tokens}" for work, t in s.items()
                )
                used = [t.num_accepted_tokens for t in s.values() if t.num_draft_tokens]
                accepted = bool(used) and all(used)
                self.log.check(f"{name} drafts are accepted", accepted or not wanted, detail)

    def reference(self, model: str, scale: Scale) -> dict[str, tuple[Requests, list[RequestOutput]]]:
        """Outputs of plain decoding: one request at a time, with graphs, without prefix cache."""
        if model not in self._known:
            start, tally = time.perf_counter(), Tally()
            llm = LLM(
                **self.models.target(model), **UNSHARED, max_num_seqs=1, max_model_len=scale.max_model_len
            )
            loaded = time.perf_counter()
            found = {}
            for name in WORKLOADS:
                requests = workload(name, llm, scale)
                found[name] = requests, requests.run(llm)
                tally.add(found[name][1])
                assert not failures(found[name][1]), failures(found[name][1])[0]
            self._known[model] = found
            self.log.note(
                f"reference of {model}: {tally.requests} requests, {tally.tokens} tokens, {tally.logprobs} logprobs; "
                f"engine {loaded - start:.0f} s, decoding {time.perf_counter() - loaded:.0f} s"
            )
            del llm
            free_memory()
        return self._known[model]

    def drafting(self, model: str, method: str, expected: dict[str, Any]) -> dict[str, Any]:
        if method != "replay":
            return self.models.drafter(model, method)
        from draftproof.drafters import recordings

        file = self.models.scratch / f"{model}-recordings.json"
        recordings.save(file, [output for _, outputs in expected.values() for output in outputs])
        head = self.models.drafter(model, HEADS.get(model, "ngram"))
        shared = {key: head.pop(key) for key in ("num_speculative_tokens", "policy")}
        return {
            "method": "replay",
            "recordings": str(file),
            "acceptance": RATE,
            "drafters": [head],
            **shared,
        }

    def engine(self, model: str, scale: Scale, given: dict[str, Any], drafting: Any, mode: str) -> LLM:
        settings = {key: value for key, value in given.items() if key != "few"}
        if "few" in given:
            settings["num_kv_blocks"] = scale.few_blocks
        return LLM(
            **self.models.target(model),
            **settings,
            speculative_config=drafting,
            enforce_eager=MODES[mode],
            max_model_len=scale.max_model_len,
        )

    def check(
        self, stage: str, llm: LLM, setting: Setting, work: str,
        expected: tuple[Requests, list[RequestOutput]], total: Tally,
    ) -> None:  # fmt: skip
        """Check one workload in one setting: outputs are equal, and not vacuously so."""
        scale = scale_of(stage.split("-")[0], self.models.quick)
        requests, reference = expected
        eager = llm.config.enforce_eager
        count = (scale.alone_eager if eager else scale.alone) if setting.group == 1 else scale.prompts
        times = max(1, setting.fill // count)
        given = Requests(requests.prompts[:count] * times, requests.params[:count] * times)
        start, tally, faults = time.perf_counter(), Tally(), llm.stats.num_drafter_faults
        preempted, found = llm.stats.num_preemptions, []
        for _ in range(setting.runs):
            cached = llm.stats.num_cached_tokens
            outputs = given.run(llm, setting.group)
            cached = llm.stats.num_cached_tokens - cached
            found += failures(outputs) or compare(reference[:count] * times, outputs)
            tally.add(outputs)
        preempted = llm.stats.num_preemptions - preempted
        s, faults = tally.speculation, llm.stats.num_drafter_faults - faults
        total.speculation.add(s)
        faulty = [f"{len(found)} DIFFER: {found[0]}"] if found else []
        faulty += list(_vacuous(llm, setting, tally, cached=cached, preempted=preempted, faults=faults))
        detail = (
            f"{tally.requests} outputs of {count} of {scale.prompts} prompts, {tally.tokens} tokens, {tally.logprobs} "
            f"logprobs; drafted {s.num_draft_tokens}, accepted {s.num_accepted_tokens}; preempted {preempted}, cached "
            f"{cached}; {time.perf_counter() - start:.1f} s"
        )
        self.log.check(f"{stage} {setting.name} {work}", not faulty, "; ".join([*faulty, detail]))

    def check_graphs(self, name: str, llm: LLM, mode: str) -> None:
        """Check that graphs were used where they should be, and that all pages are free."""
        llm.engine.drain()  # a pass of ended requests may still be in flight
        pages = llm.engine.scheduler.pages
        number = num_graphs(llm)
        pages.check_integrity()
        back = pages.num_free == pages.num_blocks - 1
        detail = f"{number} passes captured, {pages.num_free} of {pages.num_blocks - 1} blocks free"
        self.log.check(f"{name} engine afterwards", back and bool(number) != MODES[mode], detail)


def _vacuous(
    llm: LLM, setting: Setting, tally: Tally, *, cached: int, preempted: int, faults: int
) -> Iterator[str]:
    """Reasons why an equal outcome would be vacuous."""
    if not tally.tokens or not tally.logprobs:
        yield "nothing was compared"
    if llm.config.speculative_config is not None and not tally.speculation.num_draft_tokens:
        yield "nothing was drafted"
    if faults:
        yield f"{faults} faults of the drafter"
    if setting.preempts and not preempted:
        yield "nothing was preempted"
    if setting.runs > 1 and not cached:
        yield "nothing came from the prefix cache"


def main() -> int:
    flags = parser(__doc__, list(STAGES))
    flags.add_argument("--modes", default=",".join(MODES), help="of graphs,eager; default: both")
    names = [s.name for _, settings in ENGINES for s in settings]
    flags.add_argument("--settings", default=",".join(names), help=f"of {','.join(names)}; default: all")
    flags.add_argument("--eager-settings", help="the same for the mode without graphs, which is slow")
    flags.add_argument("--jobs", type=int, default=1, help="number of processes that share the stages")
    given = flags.parse_args()
    if given.jobs > 1:
        return run_apart("tests.gpu.exactness", given.stages.split(","), given.jobs)
    settings = {
        "graphs": given.settings.split(","),
        "eager": (given.eager_settings or given.settings).split(","),
    }
    print(describe(given.device), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(given.device, given.quick, given.models, Path(scratch))
        exactness = Exactness(models, CheckLog(), given.modes.split(","), settings)
        stages = {name: (lambda pair=pair: exactness.stage(*pair)) for name, pair in STAGES.items()}
        return run_stages(exactness.log, given.stages, stages)


if __name__ == "__main__":
    sys.exit(main())
