"""On the GPU: ids and logprobs with every drafter against plain decoding, bit for bit. `python tests/gpu/equality.py`.

Prints a line a setting and exits with 1 on any difference. DRAFTPROOF_TEST_MODELS=folder adds its `small` models.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from draftproof import LLM, assets
from draftproof.bench.compare import compare
from tests.conformance.cases import CASES, mixture

SETTINGS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "one at a time": {"max_num_seqs": 1},
    "no graphs": {"enforce_eager": True},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "preempted": {"num_kv_blocks": 32, "max_model_len": 448},
}


def run(**settings: Any) -> tuple[list[Any], LLM]:
    wanted = mixture()
    llm = LLM(device="cuda", **{"model": str(assets.path("tiny")), **settings})
    return llm.generate(wanted.prompts, wanted.params, use_tqdm=False), llm


def main() -> int:
    pairs = [(None, method, case.config) for method, case in CASES.items()]
    extra = os.environ.get("DRAFTPROOF_TEST_MODELS")
    if extra:
        root = Path(extra)
        heads = {"ngram": {"method": "ngram"}, "eagle3": {"model": str(root / "small-eagle3")}}
        pairs += [(str(root / "small"), f"small {name}", config) for name, config in heads.items()]
    failed = 0
    for dtype in ("bfloat16", "float32"):
        plain: dict[Any, Any] = {}  # graphs on, as below; "no graphs" must give the same bits
        for model, method, config in pairs:
            chosen = {} if model is None else {"model": model}
            for name, settings in SETTINGS.items():
                start = time.perf_counter()
                try:
                    if model not in plain:
                        plain[model], _ = run(
                            dtype=dtype, max_num_seqs=1, enable_prefix_caching=False, **chosen
                        )
                    speculative = {**config, "num_speculative_tokens": 5, "policy": "fixed"}
                    outputs, llm = run(dtype=dtype, speculative_config=speculative, **settings, **chosen)
                    differences = compare(plain[model], outputs)
                    s = llm.stats.speculation
                    verdict = "equal" if not differences else f"{len(differences)} DIFFER: {differences[0]}"
                    failed += bool(differences) or not s.num_accepted_tokens
                    print(
                        f"{dtype} {method}, {name}: {verdict}; drafted {s.num_draft_tokens}, accepted "
                        f"{s.num_accepted_tokens}, faults {llm.stats.num_drafter_faults}, "
                        f"preempted {llm.stats.num_preemptions}, {time.perf_counter() - start:.1f} s",
                        flush=True,
                    )
                except Exception:
                    failed += 1
                    print(f"{dtype} {method}, {name}: FAILED\n{traceback.format_exc(limit=-4)}", flush=True)
    print("all equal" if not failed else f"{failed} settings failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
