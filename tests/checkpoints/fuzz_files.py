"""Broken files of targets and draft heads, in four kinds: each must end in one line of ValueError, or change nothing.

    python -m tests.checkpoints.fuzz_files --cases 1000 --seed 0

A case breaks one file of a pair of target and head: a value of config.json, the dtype or layout of a tensor, the length
or bytes of a file, or a pickle in place of the weights. Then the pair is loaded and decodes a prompt. What is allowed:
a ValueError of one line that names the folder, or the output of the unbroken target without a fault of its drafter.
Within 5 s of processor time, 120 s by the clock and 1 GiB.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftproof import LLM, SamplingParams
from tests.made.derived import compressed_fp8, flat_from_speculators

ORACLE = Path(__file__).parent.parent / "data" / "oracle"
PAIRS = {  # head -> target; a head in its target's folder is a native one
    "eagle3": "target_llama",
    "peagle": "target_llama",
    "mtp": "target_qwen3",
    "dflash": "target_qwen3",
    "dflash2": "target_qwen3",
    "dspark": "target_qwen3",
    "xpress_a": "target_spec_qwen3_a",
    "zlab_dflash_a": "target_dflash_a",
    "safeailab_eagle1_a": "target_eagle_a",
    "safeailab_eagle3_a": "target_eagle_a",
    "gemma4_assistant_a": "target_gemma4_a",
    "gemma4_assistant_ordered_a": "target_gemma4_a",
    "mtp_deepseek_v3_2layer_a": "mtp_deepseek_v3_2layer_a",
    "mtp_glm4_moe_a": "mtp_glm4_moe_a",
    "mtp_mimo_a": "mtp_mimo_a",
    "target_llama": "target_llama",  # a language model as its own drafter
    "eagle3_fp8": "target_llama",  # these three are made of others: `make`
    "peagle_flat": "target_llama",
    "peagle_flat_fp8": "target_llama",
}
MOST_SECONDS, MOST_BYTES = 5.0, 1 << 30
MOST_WAITING = 120.0  # seconds by the clock, after which a case has hung
PROMPT = {"prompt_token_ids": [34, 54, 92, 36, 56, 5, 76]}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
NONSENSE: tuple[Any, ...] = (
    *(float("nan"), float("inf"), -float("inf"), -1, 1e308, 1e30, 10**400, -(10**400), 10**12, 10**8, 2**31),
    *(
        "7",
        "x",
        "",
        "\x1b[31m\n",
        [],
        {},
        [1],
        [-1],
        ["x"],
        [[[]]],
        {"a": 1},
        [float("nan")],
        {"a": {"b": []}},
    ),
)
SENSIBLE = {"rope_theta": (10**8, 10**12, 2**31)}  # values among these that a model may have
DTYPES = (
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.complex64, torch.float64),
)


class Harmful:
    """Writes a file where it is unpickled with code allowed."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return (open, (self.marker, "w"))


def paths_of(raw: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a config there is a value."""
    found = [path] if path else []
    if isinstance(raw, dict):
        for key, value in raw.items():
            found += paths_of(value, (*path, key))
    return found


def break_config(rng: random.Random, folder: Path, marker: Path) -> str:
    """One value, or a whole file, of a folder's JSON."""
    files = list(folder.glob("*.json"))
    path = rng.choice([folder / "config.json"] * 6 + files)
    raw = json.loads(path.read_text())
    way = rng.random()
    if way < 0.04:
        text = rng.choice(
            ["[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "", "null", "[1]", "{", "\ufeff{}"]
        )
        path.write_text(text)
        return f"{path.name} = {text[:20]!r}"
    at = rng.choice(paths_of(raw))
    place = raw
    for key in at[:-1]:
        place = place[key]
    if way < 0.1:
        place["unheard_of"] = rng.choice(NONSENSE)
        at = (*at[:-1], "unheard_of")
    elif way < 0.16:
        del place[at[-1]]
        if folder.name == "target":  # a default in its place may be as good as any value
            place[at[-1]] = float("nan")
    else:
        place[at[-1]] = rng.choice([v for v in NONSENSE if v not in SENSIBLE.get(at[-1], ())])
    path.write_text(json.dumps(raw))
    return f"{path.name}: {at} = {str(place.get(at[-1], 'gone'))[:30]!r}"


def weights_of(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = folder / "model.safetensors"
    if path.is_file():
        return path, load_file(path)
    path = folder / "pytorch_model.bin"
    return path, torch.load(path, weights_only=True)


def write(path: Path, tensors: dict[str, Any]) -> None:
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)


def break_dtype(rng: random.Random, folder: Path, marker: Path) -> str:
    """A tensor of another dtype, shape or layout, or with values that are no numbers."""
    path, tensors = weights_of(folder)
    name = rng.choice(sorted(tensors))
    tensor, way = tensors[name], rng.random()
    if way < 0.6:
        dtype = rng.choice(DTYPES)
        tensors[name] = tensor.to(dtype)
        what = str(dtype)
    elif way < 0.9:
        shapes = [tensor.flatten()[:1].view(()), tensor.flatten(), tensor[None].clone(), tensor[:0].clone()]
        tensors[name] = rng.choice(shapes).clone().contiguous()
        what = f"shape {list(tensors[name].shape)}"
    else:
        del tensors[name]
        what = "gone"
    write(path, tensors)
    return f"{name}: {what}"


def break_bytes(rng: random.Random, folder: Path, marker: Path) -> str:
    """A file cut short, or with other bytes in its first part."""
    path = rng.choice([weights_of(folder)[0], weights_of(folder)[0], *folder.glob("*.json")])
    data = bytearray(path.read_bytes())
    if rng.random() < 0.6:
        size = rng.choice([0, 1, 7, 8, 9, 100, rng.randrange(len(data)), len(data) - 1])
        path.write_bytes(data[:size])
        return f"{path.name} cut to {size}"
    header = int.from_bytes(data[:8], "little") + 8 if path.suffix == ".safetensors" else len(data)
    for _ in range(rng.randint(1, 4)):  # numbers of tensors may be anything: what is damaged is the structure
        data[rng.randrange(min(header, len(data), 2000))] = rng.randrange(256)
    path.write_bytes(data)
    return f"{path.name} with other bytes"


def break_pickle(rng: random.Random, folder: Path, marker: Path) -> str:
    """A pickle in place of the weights: harmful, of no tensors, of strange tensors, or damaged."""
    _, tensors = weights_of(folder)
    for path in folder.glob("model*.safetensors"):
        path.unlink()
    path, name = folder / "pytorch_model.bin", rng.choice(sorted(tensors))
    tensor = tensors[name]
    loose: list[Any] = [
        Harmful(marker), {name: Harmful(marker)}, {**tensors, "x": Harmful(marker)}, [1, 2], 7, None, {},
        {**tensors, name: 1}, {**tensors, name: "x"}, {**tensors, 5: tensor}, {"state_dict": tensors},
        {**tensors, name: tensor.float().to_sparse()}, {**tensors, name: tensor.to("meta")},
        {**tensors, name: torch.nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point())},
        {**tensors, name: tensor.flatten()[:1].expand(10**9)}, {**tensors, name: None}, set(tensors),
    ]  # fmt: skip
    number = rng.randrange(len(loose) + 5)
    if number < len(loose):
        torch.save(loose[number], path, _use_new_zipfile_serialization=rng.random() < 0.7)
        return f"pickle {number}"
    if number == len(loose):
        path.write_bytes(pickle.dumps(Harmful(marker), protocol=rng.choice([2, 4])))
        return "bare harmful pickle"
    torch.save(tensors, path)
    if number == len(loose) + 1:  # every part compressed, one of them to nothing
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02" + b"(" * 50_000_000)
        return "compressed"
    data = bytearray(path.read_bytes())
    if number == len(loose) + 2:
        path.write_bytes(data[: rng.randrange(len(data))])
        return "pickle cut short"
    start = data.find(b"data.pkl")
    for _ in range(rng.randint(1, 5)):
        data[start + rng.randrange(1000)] = rng.randrange(256)
    path.write_bytes(data)
    return "pickle with other bytes"


KINDS: dict[str, Callable[[random.Random, Path, Path], str]] = {
    "config": break_config,
    "dtype": break_dtype,
    "bytes": break_bytes,
    "pickle": break_pickle,
}


def engine(target: Path, head: Path | None) -> LLM:
    if head is None:
        config = None
    elif head == target:
        config = {"method": "mtp", "num_speculative_tokens": 1, "policy": "fixed"}
    else:
        config = {"model": str(head), "num_speculative_tokens": 2, "policy": "fixed"}
    return LLM(
        str(target),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=2,
        num_kv_blocks=16,
        speculative_config=config,
    )


def decode(llm: LLM) -> tuple[list[int], int]:
    """(ids, faults of the drafter)."""
    ids = list(llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids)
    sandbox = llm.engine.runner.drafter
    return ids, 0 if sandbox is None else sandbox.num_faults


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def current_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make(folder: Path) -> None:
    """Heads that are not among the recorded ones."""
    compressed_fp8(ORACLE / "eagle3", folder / "eagle3_fp8", "block")
    flat_from_speculators(ORACLE / "peagle", folder / "peagle_flat", {"pard_token": 255})
    compressed_fp8(folder / "peagle_flat", folder / "peagle_flat_fp8", "channel")


def run_case(
    seed: int, number: int, expected: dict[str, list[int]], made: Path, work: Path
) -> tuple[str, str, str]:
    """(kind, verdict, what was broken and what came of it); verdict "error" and "same" are good."""
    rng = random.Random(f"{seed} {number}")
    kind = list(KINDS)[number % len(KINDS)]
    # the format that may come as a pickle
    flat = [head for head in PAIRS if head.startswith(("safeailab", "peagle_flat"))]
    head_name = rng.choice(flat * 40 + list(PAIRS) if kind == "pickle" else list(PAIRS))
    target_name = PAIRS[head_name]
    native = head_name == target_name and head_name.startswith("mtp_")
    shutil.rmtree(work, ignore_errors=True)
    target, head = work / "target", work / ("target" if native else "head")
    for source, folder in {target: target_name, head: head_name}.items():
        recorded = ORACLE / folder
        original = recorded if recorded.is_dir() else made / folder
        shutil.copytree(original, source, ignore=shutil.ignore_patterns("oracle_io*"))
    marker = work / "ran"
    broken = target if rng.random() < (0.1 if kind == "pickle" else 0.35) else head
    what = KINDS[kind](rng, broken, marker)
    what = f"{head_name if broken == head else target_name}: {what}"
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before, start = current_bytes(), time.process_time()
    try:
        ids, faults = decode(engine(target, head))
    except ValueError as error:
        said = str(error)
        one_line = "\n" not in said and "\x1b" not in said and len(said) < 1200
        vague = "something of the wrong type" in said or "transformers says" in said
        verdict = "error" if one_line and not vague and str(work) in said else "unclear error"
        what = f"{what} -> {said[:400]}"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        verdict = "traceback"
        what = f"{what} -> {type(error).__name__}: {str(error)[:200]} at {place.filename}:{place.lineno}"
    else:
        verdict = "same" if ids == expected[target_name] and not faults else "other output"
        what = f"{what} -> {ids}, {faults} faults"
    seconds, num_bytes = time.process_time() - start, peak_bytes() - before
    if seconds > MOST_SECONDS or num_bytes > MOST_BYTES:
        verdict, what = "too much", f"{what}: {seconds:.1f} s, {num_bytes / 2**20:.0f} MiB"
    if marker.exists():
        verdict = "code ran"
    return kind, verdict, what


def work_on(numbers: Sequence[int], seed: int, limit: float) -> None:
    """Run cases here; a line of JSON each, before which its number is written, so that a crash is told of. The process
    ends when a case has taken `limit` seconds."""
    faulthandler.dump_traceback_later(MOST_WAITING, exit=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make(work / "made")
        expected = {name: decode(engine(ORACLE / name, None))[0] for name in set(PAIRS.values())}
        for number in numbers:
            print(json.dumps([number]), flush=True)
            faulthandler.dump_traceback_later(limit, exit=True)
            result = run_case(seed, number, expected, work / "made", work / "pair")
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps([number, *result]), flush=True)


def run(numbers: Sequence[int], seed: int, limit: float = MOST_WAITING) -> list[tuple[int, str, str, str]]:
    """All cases in a process beside this one; another takes over where one dies. `limit`: seconds by the clock."""
    found: list[tuple[int, str, str, str]] = []
    left = list(numbers)
    while left:
        done = run_worker(left, seed, limit)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        results = [tuple(line) for line in lines if len(line) == 4]
        found += results  # type: ignore[arg-type]
        last = lines[-1] if lines else [left[0]]
        if len(last) == 1:
            kind = list(KINDS)[last[0] % len(KINDS)]
            _, hung, place = done.stderr.partition("Timeout (")
            if hung:
                found.append((last[0], kind, "too much", f"{hung}{place[:500]}"))
            else:
                found.append((last[0], kind, "crash", f"exit {done.returncode}: {done.stderr[-500:]}"))
        finished = {number for number, *_ in found}
        left = [number for number in left if number not in finished]
    return sorted(found)


def run_worker(numbers: Sequence[int], seed: int, limit: float) -> subprocess.CompletedProcess[str]:
    """What it leaves behind where it dies goes with the folder that it is given."""
    command = [
        sys.executable,
        "-m",
        "tests.checkpoints.fuzz_files",
        "--seed",
        str(seed),
        "--limit",
        str(limit),
    ]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [*command, "--worker", *map(str, numbers)],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TMPDIR": folder},
        )


GOOD = ("error", "same")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print the good cases too")
    parser.add_argument("--limit", type=float, default=MOST_WAITING, help="seconds by the clock for a case")
    parser.add_argument("--worker", type=int, nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        work_on(given.worker, given.seed, given.limit)
        return 0
    found = run(range(given.first, given.first + given.cases), given.seed, given.limit)
    counts = collections.Counter((kind, verdict) for _, kind, verdict, _ in found)
    verdicts = [*GOOD, *sorted({verdict for _, verdict in counts} - set(GOOD))]
    print(f"| kind | {' | '.join(verdicts)} |")
    print(f"|---{'|---' * len(verdicts)}|")
    for kind in KINDS:
        print(f"| {kind} | {' | '.join(str(counts[kind, verdict]) for verdict in verdicts)} |")
    bad = [case for case in found if case[2] not in GOOD]
    for number, kind, verdict, what in found if given.show else bad:
        print(f"{number} {kind}: {verdict}: {what}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
