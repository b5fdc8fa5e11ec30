"""States recorded by the engine equal transformers'."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from draftproof import assets
from draftproof.train.record import StateReader

TAPS = (2, 4, 6, 8)
LONG = [5, 6, 7, 8, 9, 10, 300] * 40  # more than a pass holds
TEXTS = [LONG, [100, 101, 102], LONG[:64], [100, 101, 102]]


def test_states_are_those_of_transformers() -> None:
    directory = str(assets.path(assets.TARGET))
    engine = {
        "model": directory,
        "dtype": "float32",
        "max_num_batched_tokens": 128,
        "enable_prefix_caching": True,
    }
    reader = StateReader(TAPS, engine)
    states_TSH = reader.read(TEXTS)
    reader.close()

    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    last: list[torch.Tensor] = []
    reference.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0]))
    start = 0
    for text in TEXTS:
        with torch.no_grad():
            hidden = reference(torch.tensor([text]), output_hidden_states=True).hidden_states
        wanted = torch.stack([*(hidden[tap][0] for tap in TAPS[:-1]), last[-1]], 1)
        found = states_TSH[start : start + len(text)].float()
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-2)
        start += len(text)
    assert start == len(states_TSH)
