"""Setup of `draftproof bench`: its flags, the prompts and drafters they select, and its final output."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from draftproof import assets
from draftproof.cli import options
from draftproof.cli.prompts import read_file
from draftproof.config import ENGINE_WIDE, EngineConfig
from draftproof.types import SamplingParams

if TYPE_CHECKING:
    from draftproof.bench.harness import Benchmark, Variant
    from draftproof.bench.peers.plan import Asked
    from draftproof.bench.report import Form
    from draftproof.bench.suite import Kind, Settings
    from draftproof.models.config import ModelConfig

F = TypeVar("F", bound=Callable[..., Any])
NUMBERS, SHARES = options.NumbersType(int, positive=True), options.NumbersType(float)
RECORDINGS = "recordings.json"  # plain outputs, for replayed drafts
PROMPTS_PER_SLOT = 4  # number of random prompts per slot, if requests follow one another

FLAGS = (
    click.option(
        "--prompt-file", help="Prompts as for generate. [default: those that come with draftproof]"
    ),
    click.option("--chat", is_flag=True, help="Ask raw prompts under the chat template."),
    click.option(
        "--num-prompts", type=click.IntRange(min=1), help="Take the file's first prompts, repeated if it has fewer."
    ),
    click.option(
        "--random-input-len", type=click.IntRange(min=1), help="Use prompts of this many random ids instead."
    ),
    click.option(
        "--random-range-ratio", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True,
        help="Vary their lengths by up to this share.",
    ),
    click.option(
        "--output-len", "--random-output-len", "output_len", type=click.IntRange(min=1), default=128,
        show_default=True, help="New tokens of each request.",
    ),
    click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True),
    click.option("--temperature", type=float, default=0.0, show_default=True),
    click.option(
        "--batch-sizes", type=NUMBERS, default="1,8", show_default=True, help="Maximum numbers of requests at once."
    ),
    click.option(
        "--num-drafts", type=NUMBERS, help="K, drafts per round. [default: the drafter's own]"
    ),
    click.option(
        "--replay-acceptance", type=SHARES,
        help="Propose recorded plain output, right with these probabilities, at the drafter's cost.",
    ),
    click.option("--num-iters", type=click.IntRange(min=1), default=3, show_default=True),
    click.option(
        "--num-iters-warmup", type=click.IntRange(min=0), default=1, show_default=True
    ),
    click.option(
        "--output-dir", type=click.Path(file_okay=False, path_type=Path), default="bench-results",
        show_default=True, help="Folder for results.json, results.md and the plots.",
    ),
    click.option(
        "--against", type=options.ListType(), metavar="PEER,...",
        help="Other engines, each in its own process, in turns with ours: transformers, llama.cpp, openvino.",
    ),
    click.option(
        "--against-dtypes", type=options.ListType("bfloat16", "float16", "float32"), metavar="DTYPE,...",
        help="Precisions to compare. [default: the engine's]",
    ),
    click.option(
        "--threads", type=click.IntRange(min=1), help="Threads of each engine that is compared. [default: torch's]"
    ),
    click.option(
        "--busy", type=NUMBERS, help="Also compare while this many other processes each keep a core busy."
    ),
    click.option(
        "--peak-bandwidth", type=click.FloatRange(min=0, min_open=True),
        help="GB/s of the device's memory, for the roofline. [default: known for some GPUs]",
    ),
    click.option(
        "--peak-flops", type=click.FloatRange(min=0, min_open=True), help="TFLOP/s of the device, for the roofline."
    ),
)  # fmt: skip


def shared_flags(function: F) -> F:
    """Add the flags of all three benchmarks; they are passed as the dict `given`, the engine's as `engine`."""

    @functools.wraps(function)
    def command(**kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in names}
        return function(given=given, **kwargs)

    wrapped: Any = options.engine_flags(command)
    before = len(wrapped.__click_params__)
    for flag in reversed(FLAGS):
        wrapped = flag(wrapped)
    names = [param.name for param in wrapped.__click_params__[before:]]
    return cast(F, wrapped)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """A benchmark, checked. `engine`: keywords of `LLM` without the drafter; `record`: the settings, for the report."""

    settings: Settings
    prompts: list[list[int]]
    params: SamplingParams
    variants: list[Variant]
    engine: dict[str, Any]
    directory: Path  # the target's
    folder: Path
    model: ModelConfig
    against: Asked
    record: dict[str, Any]

    @property
    def recordings(self) -> Path:
        return self.folder / RECORDINGS


def make_plan(
    kind: Kind,
    given: Mapping[str, Any],
    engine: Mapping[str, Any],
    serving: tuple[Sequence[float], float, Sequence[str]],
) -> BenchPlan:
    """The checked benchmark. `serving`: rates, burstiness and goodput. ValueError for whatever cannot be measured."""
    settings = make_settings(kind, given, engine, *serving)
    asked = make_asked(kind, given)
    chosen = options.apart(engine)
    config, directory, model = find_target(chosen)
    prompts = make_prompts(given, config, directory, model, settings)
    shared = {
        "max_model_len": find_max_model_len(prompts, given["output_len"], model),
        "enable_prefix_caching": False,  # iterations ask the same prompts again
        **options.without_drafter(chosen),
        "max_num_seqs": max(settings.batch_sizes),
    }
    folder: Path = given["output_dir"]
    variants = make_variants(chosen.get("speculative_config"), given, folder / RECORDINGS)
    for variant in variants:  # before anything is loaded
        EngineConfig.from_kwargs(speculative_config=variant.config)
    params = SamplingParams(
        temperature=given["temperature"],
        max_tokens=given["output_len"],
        ignore_eos=given["ignore_eos"],
        detokenize=False,
    )
    longest = asked.length + max(given["output_len"], 2)
    if asked.peers and longest > model.max_position_embeddings:
        raise ValueError(
            f"--output-len {given['output_len']}: engines are compared on prompts of {asked.length} ids, and the model "
            f"was made for {model.max_position_embeddings} in all; ask for fewer, or give --random-input-len"
        )
    make_folder(folder)
    return BenchPlan(
        settings=settings,
        prompts=prompts,
        params=params,
        variants=variants,
        engine=shared,
        directory=directory,
        folder=folder,
        model=model,
        against=asked,
        record=as_record(settings, given, engine, chosen, prompts),
    )


def make_asked(kind: Kind, given: Mapping[str, Any]) -> Asked:
    """Settings for other engines; ValueError for one that is not installed, and for what they do not support."""
    from draftproof.bench import peers
    from draftproof.bench.peers.plan import LENGTH, Asked

    if not given["against"]:
        for name in ("against_dtypes", "threads", "busy"):
            if given[name]:
                raise ValueError(f"--{name.replace('_', '-')}: is of use with --against only")
        return Asked()
    if kind == "serve-like":
        raise ValueError("--against: engines get all requests at once; use latency or throughput")
    if given["temperature"] or not given["ignore_eos"]:
        raise ValueError("--against: engines are compared at --temperature 0 with --ignore-eos only")
    peers.check(given["against"])
    return Asked(
        peers=given["against"],
        dtypes=given["against_dtypes"] or (),
        num_threads=given["threads"],
        busy=given["busy"] or (),
        length=given["random_input_len"] or LENGTH,
    )


def make_settings(
    kind: Kind,
    given: Mapping[str, Any],
    engine: Mapping[str, Any],
    rates: Sequence[float],
    burstiness: float,
    goodput: Sequence[str],
) -> Settings:
    """Settings of the sweep."""
    from draftproof.bench.figures import parse_goodput
    from draftproof.bench.suite import Settings

    check(given, engine, rates)
    return Settings(
        kind=kind,
        batch_sizes=given["batch_sizes"],
        rates=rates,
        burstiness=burstiness,
        num_iters=given["num_iters"],
        num_warmups=given["num_iters_warmup"],
        goodput=parse_goodput(goodput),
        seed=engine.get("seed", 0),
        peaks=find_peaks(given),
    )


def check(given: Mapping[str, Any], engine: Mapping[str, Any], rates: Sequence[float]) -> None:
    if "max_num_seqs" in engine:
        raise ValueError("--max-num-seqs: use --batch-sizes here")
    for name, numbers in (
        ("batch-sizes", given["batch_sizes"]),
        ("num-drafts", given["num_drafts"] or [1]),
        ("request-rate", rates),
    ):
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"--{name} {','.join(f'{n:g}' for n in numbers)}: names a number twice")
    if any(not 0 <= rate <= 1 for rate in given["replay_acceptance"] or ()):
        raise ValueError("--replay-acceptance: must be probabilities, from 0 to 1")
    if given["prompt_file"] is not None and given["random_input_len"] is not None:
        raise ValueError("--prompt-file and --random-input-len: give only one of them")
    if (given["peak_bandwidth"] is None) != (given["peak_flops"] is None):
        raise ValueError("--peak-bandwidth and --peak-flops: give both or none")


def find_peaks(given: Mapping[str, Any]) -> Any:
    from draftproof.bench.rooflines import Peaks

    if given["peak_bandwidth"] is None:
        return None
    return Peaks(given["peak_bandwidth"] * 1e9, given["peak_flops"] * 1e12)


def find_target(engine: Mapping[str, Any]) -> tuple[EngineConfig, Path, ModelConfig]:
    from draftproof.engine.loading.locate import locate
    from draftproof.frontend.llm import show_progress
    from draftproof.models.config import read_config

    config, directory = locate(EngineConfig.from_kwargs(**engine), show_progress)
    return config, directory, read_config(directory, overrides=config.hf_overrides)


def make_prompts(
    given: Mapping[str, Any], config: EngineConfig, directory: Path, model: ModelConfig, settings: Settings
) -> list[list[int]]:
    """Ids of every prompt, at least as many as the largest batch."""
    from draftproof.bench import workload
    from draftproof.frontend.text import Tokenizer
    from draftproof.models.loading import resolve_tokenizer

    most = max(settings.batch_sizes)
    if given["random_input_len"] is not None:
        count = given["num_prompts"] or most * (1 if settings.kind == "latency" else PROMPTS_PER_SLOT)
        lengths = (given["random_input_len"], given["random_range_ratio"])
        return workload.random_prompts(max(count, most), *lengths, model.vocab_size, settings.seed)
    file = assets.path(assets.PROMPTS) if given["prompt_file"] is None else Path(given["prompt_file"])
    read = read_file(file)[: given["num_prompts"]]
    folder = directory if config.tokenizer is None else resolve_tokenizer(config.tokenizer)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(
            f"model={config.model!r}: has no tokenizer; use --random-input-len, or give --tokenizer"
        )
    tokenizer = Tokenizer(folder)
    ids = [prompt.token_ids(tokenizer, given["chat"]) for prompt in read]
    return workload.cycled(ids, max(given["num_prompts"] or len(ids), most))


def find_max_model_len(prompts: Sequence[list[int]], output_len: int, model: ModelConfig) -> int:
    """The length of the longest request; more would only waste memory."""
    longest = max(map(len, prompts))
    if longest + output_len > model.max_position_embeddings:
        raise ValueError(
            f"--output-len {output_len}: the longest prompt has {longest} tokens, and the model was made for "
            f"{model.max_position_embeddings} in all; ask for fewer, or shorter prompts"
        )
    return longest + output_len


def make_variants(
    drafter: Mapping[str, Any] | None, given: Mapping[str, Any], recordings: Path
) -> list[Variant]:
    """One variant per number of drafts (and acceptance). ValueError for --num-drafts without a drafter."""
    from draftproof.bench.harness import Variant

    rates: Sequence[float | None] = given["replay_acceptance"] or [None]
    if drafter is None and rates == [None]:
        if given["num_drafts"]:
            raise ValueError("--num-drafts: name the drafter with --speculative-config, such as ngram")
        return []
    own = dict(drafter or {})
    counts = given["num_drafts"] or [own.pop("num_speculative_tokens", None)]
    own.pop("num_speculative_tokens", None)
    found = []
    for count in counts:
        number = {} if count is None else {"num_speculative_tokens": count}
        name = "speculative" if count is None else f"K={count}"
        for rate in rates:
            if rate is None:
                found.append(Variant(name, {"policy": "fixed", **own, **number}))
                continue
            inner = [{k: v for k, v in own.items() if k not in ENGINE_WIDE}] if own else []
            wide = {k: v for k, v in own.items() if k in ENGINE_WIDE and k != "policy"}
            replay = {
                **wide,
                "method": "replay",
                "recordings": str(recordings),
                "acceptance": rate,
                "drafters": inner,
            }
            config = {"policy": "fixed", **replay, **number}
            found.append(Variant(f"{name}, right at {rate:g}", config, acceptance=rate))
    return found


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output-dir {folder}: cannot be made: {error}") from None


def tell(line: str) -> None:
    """Print a line of progress, if stderr is a terminal."""
    if sys.stderr.isatty():
        click.echo(line, err=True)


def conclude(bench: Benchmark, form: Form, folder: Path, results: Mapping[str, Any]) -> None:
    """Write the files, and print the page."""
    from draftproof.bench import plots, report

    files = report.write(folder, form, results)
    click.echo(form.page(results).partition("\n")[2].lstrip(), nl=False)
    for difference in bench.differences[:3]:
        click.echo(str(difference))
    if not plots.available():
        click.echo("no plots: matplotlib is not installed (pip install draftproof[bench])", err=True)
    click.echo(f"written to {folder}: {', '.join(files)}")


def as_record(
    settings: Settings,
    given: Mapping[str, Any],
    engine: Mapping[str, Any],
    chosen: Mapping[str, Any],
    prompts: Sequence[list[int]],
) -> dict[str, Any]:
    """The settings by their names on the command line; no paths except those given by the user."""
    drafter = chosen.get("speculative_config") or {}
    source = f"random, {given['random_input_len']} tokens" if given["random_input_len"] else None
    return {
        "model": Path(engine["model"]).name if "model" in engine else assets.default_model().name,
        "drafter": drafter.get("method") or Path(drafter.get("model", "")).name,
        "engine": dict(engine),
        **{k: v for k, v in given.items() if k not in ("output_dir", "prompt_file")},
        **{
            k: v
            for k, v in dataclasses.asdict(settings).items()
            if k not in ("kind", "batch_sizes", "num_iters")
        },
        "prompts": source or Path(given["prompt_file"] or "those of the package").name,
        "num_prompts": len(prompts),
        "prompt_lengths": [min(map(len, prompts)), max(map(len, prompts))],
    }
