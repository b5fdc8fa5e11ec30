"""The rotary table: equal to what transformers computes, extended bit for bit, independent of threads."""

from __future__ import annotations

import pytest
import torch
import transformers  # imports its models lazily, so test collection stays fast

from draftproof.models.rope import cos_sin_table, inverse_frequencies, parse_rope

CPU = torch.device("cpu")
TYPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-options": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 24,
        "beta_slow": 2,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_the_table_is_that_of_transformers(name: str, theta: float) -> None:
    parameters = {**TYPES[name], "rope_theta": theta}
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            head_dim=128, max_position_embeddings=131072, rope_parameters=dict(parameters)
        )
    )
    rope = parse_rope({"rope_parameters": parameters}, 128, 131072, "config.json")
    assert torch.equal(inverse_frequencies(rope), theirs.inv_freq)
    length = 5000
    cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
    table = cos_sin_table(rope, length, CPU)
    assert table.shape == (length, 128)
    torch.testing.assert_close(table[:, :64], cos[0, :, :64], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, 64:], sin[0, :, :64], rtol=0, atol=1e-6)


def test_a_longer_table_extends_a_shorter_one_at_any_number_of_threads() -> None:
    rope = parse_rope({"rope_theta": 10000.0}, 48, 4096, "config.json")
    before = torch.get_num_threads()
    tables = []
    try:
        for threads, length in ((1, 1001), (2, 4096), (3, 2777)):
            torch.set_num_threads(threads)
            tables.append(cos_sin_table(rope, length, CPU))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(tables[0], tables[1][:1001])
    assert torch.equal(tables[2], tables[1][:2777])


def test_yarn_without_a_factor_is_told_by_two_lengths_or_refused() -> None:
    lengths = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 4096}
    assert parse_rope({"rope_parameters": lengths}, 64, 16384, "config.json").factor == 4.0
    with pytest.raises(ValueError, match="rotary embedding: factor is missing"):
        parse_rope({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, 64, 4096, "config.json")


def test_a_table_beyond_all_measure_is_refused_before_it_is_made() -> None:
    rope = parse_rope({"rope_parameters": {"rope_theta": 1e4}}, 64, 4096, "config.json")
    with pytest.raises(ValueError, match=r"would take 238 GiB, but .* GiB are free; lower max_model_len"):
        cos_sin_table(rope, 10**9, CPU)
