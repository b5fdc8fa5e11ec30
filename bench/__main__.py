"""Every figure of docs/benchmarks.md's CPU part: `python -m bench [--models DIR] [--only NAME,...] [--quick]`.

DIR contains `small`, `small-eagle3` and so on; without it only the embedded model is measured.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

from bench import cpu
from draftproof import assets


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--models", type=Path, default=None, help="folder with more models")
    parser.add_argument("--only", default=",".join(cpu.SECTIONS), help="sections, separated by commas")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: a smoke test, no figures")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there too")
    given = parser.parse_args()
    unknown = [section for section in given.only.split(",") if section not in cpu.SECTIONS]
    if unknown:
        parser.error(f"--only: {unknown[0]!r}: choose from {', '.join(cpu.SECTIONS)}")
    root = given.models or assets.path("tiny").parent
    names = [n for n in ("tiny", "small") if (root / n).is_dir()]
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    figures: dict[str, list[cpu.Row]] = {}
    for section in given.only.split(","):
        for name in names:
            setup = cpu.Setup(root=root, model=name, repeats=2 if given.quick else 7)
            for row in cpu.SECTIONS[section](setup):
                print(json.dumps({"section": section, "model": name, **row}), flush=True)
                figures.setdefault(section, []).append({"model": name, **row})
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
