"""A head in training computes the same logits as our drafter with it, and compares them with the same target rows.

Both get the same text and states; our passes are those of `tests/drafters`, which are also compared with other
implementations. Shapes: T tokens, D draft vocabulary, N draft rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from draftproof import assets
from draftproof.models.config import read_config
from draftproof.train.heads import TrainedHead
from draftproof.train.recipes import Target
from draftproof.train.settings import HeadConfig
from tests.drafters.forced import block_states, chain_logits, mask_logits, module_steps
from tests.drafters.heads import Pair, close
from tests.helpers import Paged, run_rows
from tests.train.library import needs_library

pytestmark = needs_library

TAPS = (2, 4, 6, 8)
NUM_DRAFTS = 3
TOKENS = [(37 * i * i + 11) % 8000 + 5 for i in range(40)]
BEFORE = [500, 501, 502, 503]  # another text in the row: too short for a loss, and masked
SCORED = range(NUM_DRAFTS + 1, len(TOKENS))  # the first tokens of a text have no loss


class Compared:
    """An untrained head, read by our engine, and the library's results with it on the text."""

    def __init__(self, method: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory = assets.path(assets.TARGET)
        size = None if method == "mtp" else 512
        config = HeadConfig(
            method=method,  # type: ignore[arg-type]
            num_drafts=NUM_DRAFTS,
            draft_vocab_size=size,
            intermediate_size=64,
            tokens_per_step=len(BEFORE + TOKENS),
        )
        target = Target(directory, read_config(directory), "tiny")
        frequencies_V = torch.bincount(torch.tensor(TOKENS * 2 + list(range(4000))), minlength=8192)
        self.head = TrainedHead(config, target, frequencies_V, torch.device("cpu"))
        disturb(self.head)
        self.head.save(folder)
        save_file({"input_ids_raw": torch.tensor(TOKENS)}, folder / "oracle_io.safetensors")
        self.pair = Pair(str(folder), str(directory), num_drafts=NUM_DRAFTS)
        rows = [(0, 0, TOKENS), (1, 0, BEFORE)]
        out = run_rows(self.pair.target, Paged(self.pair.target.kv), rows, TAPS, final=False)
        states, states_before = torch.stack(out.taps, 1).split([len(TOKENS), len(BEFORE)])
        self.logits = recorded(self.head.model.lm_head)
        self.targets = recorded(getattr(self.head.model, "verifier_lm_head", None))
        self.chosen: list[tuple[Tensor, ...]] = []  # the rows that were drawn
        for name in ("peagle.core.generate_cod_sample_indices", "dflash.core.select_anchors"):
            spy(monkeypatch, f"speculators.models.{name}", self.chosen)
        self.head.model.eval()
        torch.manual_seed(1)
        with torch.no_grad():
            texts = [torch.tensor(BEFORE), torch.tensor(TOKENS)]
            loss, _ = self.head.losses(texts, [states_before, states], TAPS)
        self.loss = loss.item()
        target_TV = self.pair.target.logits(out.hidden_TH[: len(TOKENS)])
        self.wanted_TD = target_TV if self.pair.head.ids_V is None else target_TV[:, self.pair.head.ids_V]


def disturb(head: TrainedHead) -> None:
    """Give norms distinct weights, which bf16 represents exactly."""
    torch.manual_seed(5)
    for parameter in head.parameters.values():
        if parameter.dim() == 1:
            parameter.data *= torch.rand_like(parameter) + 0.5
        parameter.data = parameter.data.to(torch.bfloat16).float()


def recorded(module: Any) -> list[Tensor]:
    """A list that collects the module's outputs from now on."""
    found: list[Tensor] = []
    if module is not None:
        module.register_forward_hook(lambda _, given, out: found.append(out[0]))
    return found


def spy(monkeypatch: pytest.MonkeyPatch, name: str, found: list[tuple[Tensor, ...]]) -> None:
    module, _, function = name.rpartition(".")
    real = getattr(__import__(module, fromlist=[function]), function)

    def told(*args: Any, **more: Any) -> tuple[Tensor, ...]:
        found.append(real(*args, **more))
        return found[-1]

    monkeypatch.setattr(name, told)


def divergence(wanted_ND: Tensor, found_ND: Tensor) -> Tensor:
    return kl_div(found_ND.log_softmax(-1), wanted_ND.softmax(-1), reduction="none").sum(-1)


def eagle3(made: Compared) -> float:
    """Row i drafts the tokens from i + 2 on."""
    start = len(BEFORE) - 1
    close(made.targets[0][start : start + len(TOKENS) - 1], made.wanted_TD[1:])
    loss = 0.0
    for step, logits_ND in enumerate(chain_logits(made.pair, NUM_DRAFTS)):
        close(logits_ND, made.logits[step][start : start + len(logits_ND)])
        wanted_ND = made.wanted_TD[1 + step :]
        scored = [i for i in range(len(logits_ND)) if i + 1 + step in SCORED]
        loss += made.head.config.loss_decay**step * divergence(wanted_ND, logits_ND)[scored].mean().item()
    return loss


def peagle(made: Compared) -> float:
    """Element (anchor a, depth d) drafts token a + d + 2."""
    ((anchors_N, depths_N),) = made.chosen
    start = len(BEFORE) - 1
    own_N = (anchors_N >= start) & (anchors_N < start + len(TOKENS) - 1)
    anchors_N, depths_N = anchors_N[own_N] - start, depths_N[own_N]
    assert depths_N.bincount().tolist() == [39, 24, 16]
    logits_ND = mask_logits(made.pair, anchors_N.tolist(), depths_N.tolist())
    close(logits_ND, made.logits[0][own_N])
    places_N = anchors_N + depths_N + 1
    close(made.targets[0][start + places_N - 1], made.wanted_TD[places_N])
    scored = [n for n, place in enumerate(places_N.tolist()) if place in SCORED]
    return divergence(made.wanted_TD[places_N], logits_ND)[scored].mean().item()


def mtp(made: Compared) -> float:
    """Row i of step s drafts token i + s + 2, and is compared with the text's."""
    (tap,) = made.pair.taps()
    num_rows, loss = len(TOKENS) - NUM_DRAFTS - 1, 0.0
    for step, (hidden, _) in enumerate(module_steps(made.pair, tap, NUM_DRAFTS, num_rows)):
        logits_ND = made.pair.head.logits(hidden)
        close(logits_ND, made.logits[step][len(BEFORE) :])
        places = range(step + 2, step + 2 + num_rows)
        scored = [n for n, place in enumerate(places) if place in SCORED]
        share = 0.8**step / sum(0.8**s for s in range(NUM_DRAFTS))
        truth = torch.tensor([TOKENS[places[n]] for n in scored])
        loss += share * cross_entropy(logits_ND[scored], truth).item()
    return loss


def dflash(made: Compared) -> float:
    """Slot k of the block at p drafts token p + k."""
    ((anchors, is_valid),) = made.chosen
    anchors = anchors[is_valid] - len(BEFORE)
    assert len(anchors) == 5
    logits_ND = made.pair.head.logits(block_states(made.pair, anchors.tolist()))
    close(logits_ND, made.logits[0][: len(logits_ND)])
    places_N = (anchors[:, None] + torch.arange(NUM_DRAFTS + 1)).flatten()
    close(made.targets[0][: len(places_N)], made.wanted_TD[places_N - 1])
    return made.loss  # weighted by the library


METHODS: dict[str, Callable[[Compared], float]] = {
    "eagle3": eagle3,
    "peagle": peagle,
    "mtp": mtp,
    "dflash": dflash,
}


@pytest.mark.parametrize("method", METHODS)
def test_training_computes_what_drafting_computes(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Compared(method, tmp_path, monkeypatch)
    assert METHODS[method](made) == pytest.approx(made.loss, rel=1e-4)
    assert made.loss > 0.5
