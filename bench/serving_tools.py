"""Runs third-party tools against our server, and compares their figures with the server's own.

    PYTHONPATH=src:. python bench/serving_tools.py aiperf guidellm lm-eval compatcanary [--site DIR]

AIPerf and GuideLLM load a server of the embedded model with its EAGLE-3 head; their figures of acceptance must be those
of /metrics. lm-eval scores a task of this file at a server with a drafter and at one without, greedily and sampled; the
numbers must be equal. CompatCanary asks what an OpenAI-compatible API must answer (chats, streams, a call that must
come, a strict schema, Responses); every probe must pass. It is run by Node (`npm install --prefix DIR compatcanary`),
the others as `python -m`, with DIR in front of their path; none needs a network. Exit status 1 if a figure differs, or
a tool is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.clients import Server
from draftproof import assets

EAGLE3 = {"model": str(assets.path("tiny-eagle3")), "num_speculative_tokens": 4, "policy": "fixed"}
TOKENIZER = str(assets.path(assets.TARGET))
MODEL = {"model": TOKENIZER, "served_model_name": "tiny"}
NUM_REQUESTS, NUM_AT_ONCE, NUM_PROMPT, NUM_OUTPUT = 24, 4, 64, 48
CHOICES = """\
task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
"""
ANSWERS = """\
task: local_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 32, temperature: {temperature}}}
metric_list:
  - {{metric: chrf}}
"""
CODE = (
    "def add(a, b):\n    return",
    "for i in range(",
    "import os\nimport",
    "class A:\n    def",
    "x = [1, 2,",
)
ENDINGS = (" a + b", "10):", " sys", " __init__(self):", " 3]")


def run(module: str, site: Path | None, *arguments: str) -> None:
    """Run a tool to its end; its output is shown only if it fails."""
    paths = [str(site)] if site else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        if f"No module named {module}" in done.stderr:
            raise SystemExit(f"{module}: is not installed; pip install it, or give --site")
        raise RuntimeError(f"{module} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def aiperf(server: Server, site: Path | None, folder: Path) -> dict[str, tuple[float, float]]:
    """(AIPerf's figure, ours) by name."""
    host, port = server.address
    asked = ["--request-count", NUM_REQUESTS, "--concurrency", NUM_AT_ONCE, "--isl", NUM_PROMPT]
    asked += ["--osl", NUM_OUTPUT, "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
    where = ["-m", "tiny", "--url", f"http://{host}:{port}", "--tokenizer", TOKENIZER]
    how = ["--endpoint-type", "completions", "--streaming", "--ui", "none", "--artifact-dir", str(folder)]
    run("aiperf", site, "profile", *where, *how, *map(str, asked))
    (found,) = folder.rglob("profile_export_aiperf.json")
    told = json.loads(found.read_text())
    ours = asyncio.run(server.metrics())
    accepted = ours["spec_decode_num_accepted_tokens_total"]
    drafted, rounds = ours["spec_decode_num_draft_tokens_total"], ours["spec_decode_num_drafts_total"]
    return {
        "drafts": (told["total_draft_tokens"]["avg"], drafted),
        "accepted drafts": (told["total_accepted_draft_tokens"]["avg"], accepted),
        "rounds": (told["total_spec_decode_steps"]["avg"], rounds),
        "% accepted": (told["spec_decode_overall_draft_acceptance_rate"]["avg"], 100 * accepted / drafted),
    }


def guidellm(server: Server, site: Path | None, folder: Path) -> dict[str, tuple[float, float]]:
    """(GuideLLM's figure, ours) by name."""
    host, port = server.address
    file = folder / "guidellm.json"
    arguments = {
        "backend": f"kind=openai_http,target=http://{host}:{port}",
        "profile": f"kind=concurrent,streams={NUM_AT_ONCE}",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
        "data": f"kind=synthetic_text,prompt_tokens={NUM_PROMPT},output_tokens={NUM_OUTPUT}",
        "output": f"kind=json,path={file}",
    }
    given = [part for name, value in arguments.items() for part in (f"--{name}", value)]
    run("guidellm", site, "run", *given, "--disable-console")
    metrics = json.loads(file.read_text())["benchmarks"][0]["metrics"]
    ours = asyncio.run(server.metrics())
    tokens, events = ours["generation_tokens_total"], ours["inter_token_latency_seconds_count"]
    events += ours["time_to_first_token_seconds_count"]
    written = metrics["output_token_count"]["successful"]["total_sum"]
    told = metrics["output_tokens_per_iteration"]["successful"]["mean"]
    return {"tokens": (written, tokens), "tokens an event": (told, tokens / events)}


def compatcanary(server: Server, site: Path | None, folder: Path) -> dict[str, tuple[str, str]]:
    """(result, "pass") by probe."""
    host, port = server.address
    script = (site or Path()) / "node_modules/compatcanary/src/cli.js"
    command = ["node", str(script)] if script.exists() else [shutil.which("compatcanary") or ""]
    if not shutil.which(command[0]):
        raise SystemExit(
            "compatcanary: is not installed; npm install --prefix DIR compatcanary, and give --site DIR"
        )
    file = folder / "report.json"
    where = ["--base-url", f"http://{host}:{port}/v1", "--model", "tiny", "--profile", "modern"]
    how = ["--format", "json", "--output", str(file), "--fail-on", "never", "--timeout", "120"]
    subprocess.run([*command, "scan", *where, *how], check=True, capture_output=True)
    results = json.loads(file.read_text())["results"]
    told = {result["id"]: result["status"] for result in results}
    failures = {r["id"]: f"{r['status']}: {r['summary']}" for r in results if r["status"] != "pass"}
    return {name: (failures.get(name, status), "pass") for name, status in told.items()}


def lm_eval(site: Path | None, folder: Path) -> dict[str, tuple[Any, Any]]:
    """(with a drafter, without) by metric of a task."""
    file = folder / "questions.json"
    rows = [
        {"question": question, "choices": list(ENDINGS), "label": number, "target": ENDINGS[number]}
        for number, question in enumerate(CODE)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    (folder / "choices.yaml").write_text(CHOICES.format(file=file))
    (folder / "answers.yaml").write_text(ANSWERS.format(file=file, temperature=0.7))
    results: list[Mapping[str, Any]] = []
    for number, settings in enumerate(({"speculative_config": EAGLE3}, {})):
        server, own = Server({**MODEL, **settings}), folder / str(number)
        host, port = server.address
        url = f"http://{host}:{port}/v1/completions"
        about = (
            f"model=tiny,base_url={url},tokenizer={TOKENIZER},tokenizer_backend=huggingface,num_concurrent=4"
        )
        tasks = ["--tasks", "local_choices,local_answers", "--include_path", str(folder)]
        try:
            told = ["--output_path", str(own), "--log_samples"]
            run("lm_eval", site, "run", "--model", "local-completions", "--model_args", about, *tasks, *told)
        finally:
            server.stop()
        (found,) = own.rglob("results_*.json")
        results.append(json.loads(found.read_text())["results"])
    return {
        f"{task}, {name}": (value, results[1][task][name])
        for task, metrics in results[0].items()
        for name, value in metrics.items()
        if isinstance(value, (int, float))
    }


LOADING: dict[str, Callable[..., dict[str, tuple[Any, Any]]]] = {
    "aiperf": aiperf,
    "guidellm": guidellm,
    "compatcanary": compatcanary,
}


def with_server(tool: Callable[..., dict[str, tuple[Any, Any]]], site: Path | None, folder: Path) -> Any:
    server = Server({**MODEL, "speculative_config": EAGLE3})
    try:
        return tool(server, site, folder)
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tools", nargs="+", choices=(*LOADING, "lm-eval"))
    parser.add_argument("--site", type=Path, help="folder with the tool and what it imports")
    given = parser.parse_args()
    is_wrong = False
    for name in given.tools:
        with tempfile.TemporaryDirectory() as folder:
            if name == "lm-eval":
                pairs = lm_eval(given.site, Path(folder))
            else:
                pairs = with_server(LOADING[name], given.site, Path(folder))
        for what, (theirs, ours) in pairs.items():
            # figures in files are rounded; a mean of ratios is close to the ratio of sums for requests of equal length
            is_exact = name in ("lm-eval", "compatcanary")
            is_equal = theirs == ours if is_exact else math.isclose(theirs, ours, rel_tol=0.02)
            is_wrong |= not is_equal
            print(f"{name}: {what}: {theirs} and {ours}{'' if is_equal else '  DIFFERENT'}", flush=True)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
