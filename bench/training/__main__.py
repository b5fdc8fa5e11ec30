"""Train an EAGLE-3 head further, on one GPU: how `smollm2-eagle3` was made from a head of `draftproof train`.

`draftproof train` stores the target's states on disk (37.7 GB for 8 M tokens) and generates answers with the engine,
whose bits do not depend on the batch. Here target and head run in one process in plain torch: thousands of answers at
once, and each step computes the states that it trains on, so many more tokens are used in the same time. Prompts,
vocabulary, layout and the final check are draftproof's own; FOLDER gets a head that the engine reads.

    pip install 'draftproof[train,demo]'
    python -m draftproof.train.corpus prompts --num-prompts 60000 --seed 1
    head -n 25000 prompts/train.jsonl > first.jsonl
    draftproof train start --prompt-file first.jsonl --max-prompt-tokens 384 --intermediate-size 3072 \\
        --tokens-per-step 8192 --state-noise 0.05 --weight-decay 0.02 --max-seconds 205 --num-steps 1000000
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m bench.training FOLDER --start start \\
        --prompt-file prompts/train.jsonl --held-out-file prompts/held_out.jsonl \\
        --held-out-file src/draftproof/assets/prompts/demo.jsonl

Without --start it continues from the head in the package. Stages (--stages answers,train,check) resume where they were
stopped: `answers.safetensors` is written once, checkpoints every --save-every seconds. `train.json` has all settings
and results, `log.jsonl` the losses, `report.md` tokens per round (tau) on held-out prompts.
Other settings: the flags of settings.py. Keys and values of 3072 answers take 45 GB of GPU memory; a smaller GPU takes
--answers-at-once 512 and --tokens-per-step 8192. It runs on a CPU at toy size:

    python -m bench.training toy --prompt-file FILE --max-tokens 16 --max-seconds 5 --tokens-per-step 512

Files: target.py and answers.py (the target, its answers), head.py and loss.py (the head, its loss), loop.py (training).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from bench.training import answers, loop
from bench.training.head import Head
from bench.training.loss import make_loss
from bench.training.settings import Settings
from bench.training.target import Target
from draftproof import assets
from draftproof.cli.prompts import read_file
from draftproof.engine.loading import memory
from draftproof.frontend.text import Tokenizer
from draftproof.models.loading import read_generation_config, resolve
from draftproof.train import check, recipes
from draftproof.train.settings import FILE, check_same, write_record

STAGES = ("answers", "train", "check")
ANSWERS = "answers.safetensors"
CHECK_TOKENS = 96
TEMPERATURES = (0.0, 0.8)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(argv)
    stages = given.stages.split(",")
    if not set(stages) <= set(STAGES):
        parser.error(f"--stages {given.stages}: choose from {','.join(STAGES)}")
    if {"answers", "train"} & set(stages) and given.prompt_file is None:
        parser.error("--prompt-file: name the prompts to train on")
    settings = Settings(**{field.name: getattr(given, field.name) for field in fields(Settings)})
    device = memory.pick_device(given.device)
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a new plan for each shape
    model = given.model or assets.default_model().where
    target = Target(resolve(model), settings.num_positions, device)
    tokenizer = Tokenizer(target.directory)
    given.folder.mkdir(parents=True, exist_ok=True)
    if {"answers", "train"} & set(stages):
        head = Head(given.start, target, settings.num_positions)
        loss = make_loss(len(head.ids_C), device)
        torch.manual_seed(settings.seed)
        prompts = [p.token_ids(tokenizer, chat=False) for p in read_file(given.prompt_file)[: given.limit]]
        prompts = [ids for ids in prompts if 4 <= len(ids) <= settings.max_prompt_tokens]
        record = _open(given.folder, target, Path(model).stem, given.start, prompts, settings)
        if not (given.folder / ANSWERS).is_file():
            ends = read_generation_config(target.directory).eos_token_ids or target.config.eos_token_ids
            answers.answer_all(target, prompts, ends, settings, given.folder / ANSWERS)
        if "train" in stages:
            _train(loop.Learner(target, head, settings, loss), given.folder, record)
    if "check" in stages and given.held_out_file:
        held_out = _held_out(given.held_out_file, given.num_held_out, tokenizer)
        torch.cuda.empty_cache()  # frees memory of training; does nothing without a GPU
        engine = {"model": str(model), "dtype": "bfloat16", "device": str(device)}
        rows = check.check(engine, given.folder, held_out, TEMPERATURES, CHECK_TOKENS)
        print(check.report(rows, given.folder))
    return 0


def _open(
    folder: Path, target: Target, name: str, start: Path, prompts: Sequence[Sequence[int]], settings: Settings
) -> dict[str, Any]:
    """The record of the folder. ValueError if its files were made with other settings."""
    if not prompts:
        raise ValueError(f"--prompt-file: no prompt has 4 to {settings.max_prompt_tokens} tokens")
    record = {
        "target": recipes.Target(target.directory, target.config, name).record,
        "started_from": start.name,
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "settings": asdict(settings),
    }
    path = folder / FILE
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    record |= {key: kept[key] for key in ("trained_on", "held_back") if key in kept}
    if not check_same(path, record):
        write_record(path, record)
    return record


def _train(learner: loop.Learner, folder: Path, record: dict[str, Any]) -> None:
    texts, held = answers.hold_back(answers.load(folder / ANSWERS))
    found = loop.train(learner, texts, held, folder)
    trained_on = {
        "texts": len(texts),
        "tokens": sum(len(text.tokens_T) for text in texts),
        "tokens_read": learner.tokens_read,
        "steps": learner.step,
        "seconds": round(learner.seconds, 1),
        "device": str(learner.target.device),
    }
    write_record(folder / FILE, {**record, "trained_on": trained_on, "held_back": found})


def _held_out(files: Sequence[Path], num_each: int, tokenizer: Tokenizer) -> list[check.HeldOutPrompt]:
    """The first prompts of each domain; without domains a file's prompts are split into chats and texts."""
    chosen: dict[str, list[check.HeldOutPrompt]] = {}
    for file in files:
        for prompt in read_file(file):
            domain = prompt.domain or f"{file.stem}, {'chat' if prompt.messages else 'text'}"
            among = chosen.setdefault(domain, [])
            if len(among) < num_each:
                among.append(check.HeldOutPrompt(domain, prompt.token_ids(tokenizer, chat=False)))
    return [prompt for among in chosen.values() for prompt in among]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path)
    add("--prompt-file", type=Path, help="prompts to train on, as for draftproof generate")
    add(
        "--held-out-file",
        type=Path,
        action="append",
        default=[],
        help="prompts to check with; may be given again",
    )
    add("--num-held-out", type=int, default=10, help="of each domain")
    add("--model", help="the target; left out: SmolLM2-135M-Instruct from its package")
    add("--start", type=Path, default=assets.path("smollm2-eagle3"), help="the head to start from")
    add("--stages", default=",".join(STAGES))
    add("--limit", type=int, help="so many prompts, no more")
    add("--device", default="auto")
    for field in fields(Settings):
        flag, text = "--" + field.name.replace("_", "-"), f"{field.metadata['help']} [{field.default}]"
        add(flag, type=type(field.default), default=field.default, help=text)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
