"""The shared noise: uniform, independent across rows, finite, and what it buys.

Shapes: M rows, V columns.
"""

from __future__ import annotations

import pytest
import scipy  # its stats are imported when they are named
import torch
from torch import Tensor

from draftproof.sampling.noise import Domain, derive, gumbel, row_seed, token_bits, uniform

NUM = 2048


def seeds_of(choices: range) -> Tensor:
    return torch.tensor([row_seed(7, 0, 0, choice) for choice in choices])


def by_position() -> Tensor:
    return token_bits(torch.full((NUM,), 5), torch.arange(NUM), torch.arange(64))


def by_seed() -> Tensor:
    return token_bits(torch.arange(NUM) - 100, torch.zeros(NUM).long(), torch.arange(64))


def by_choice() -> Tensor:
    return token_bits(seeds_of(range(NUM)), torch.full((NUM,), 9), torch.arange(64))


def by_round() -> Tensor:
    seeds_M = derive(torch.full((NUM,), 5), Domain.DRAFT, torch.arange(NUM))
    return token_bits(seeds_M, torch.full((NUM,), 3), torch.arange(64))


BITS = [by_position, by_seed, by_choice, by_round]


@pytest.mark.parametrize("bits", BITS)
def test_every_byte_of_the_hash_is_uniform(bits) -> None:  # type: ignore[no-untyped-def]
    bits_MV = bits()
    for shift in (0, 8, 16, 24):
        counts = ((bits_MV >> shift) & 255).flatten().bincount(minlength=256)
        assert scipy.stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("bits", BITS)
def test_neighbouring_rows_and_tokens_are_independent(bits) -> None:  # type: ignore[no-untyped-def]
    cells_MV = bits() >> 28  # 16 cells
    for a, b in (
        (cells_MV[1:], cells_MV[:-1]),
        (cells_MV[:, 1:], cells_MV[:, :-1]),
        (cells_MV[1:, 1:], cells_MV[:-1, :-1]),
    ):
        counts = (a * 16 + b).flatten().bincount(minlength=256)
        assert scipy.stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("bits", BITS)
def test_each_bit_of_neighbouring_rows_differs_half_of_the_time(bits) -> None:  # type: ignore[no-untyped-def]
    bits_MV = bits()
    flips_MV = bits_MV[1:] ^ bits_MV[:-1]
    for bit in range(32):
        share = ((flips_MV >> bit) & 1).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / flips_MV.numel() ** 0.5


def test_domains_are_independent_of_each_other_and_of_the_shared_noise() -> None:
    seeds_M, rounds_M, positions_M = torch.arange(NUM), torch.full((NUM,), 8), torch.full((NUM,), 8)
    streams = [seeds_M, *(derive(seeds_M, domain, rounds_M) for domain in Domain)]
    cells = [token_bits(s, positions_M, torch.arange(64)) >> 28 for s in streams]
    for i, a in enumerate(cells):
        for b in cells[:i]:
            assert scipy.stats.chisquare((a * 16 + b).flatten().bincount(minlength=256).numpy()).pvalue > 1e-4


def test_uniform_and_gumbel_have_their_distributions() -> None:
    seeds_M, positions_M, ids_V = torch.arange(NUM), torch.full((NUM,), 3), torch.arange(64)
    u = uniform(token_bits(seeds_M, positions_M, ids_V)).flatten()
    assert scipy.stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    noise = gumbel(seeds_M, positions_M, ids_V).flatten()
    assert noise.isfinite().all()
    assert scipy.stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3


def test_row_seeds_do_not_collide_across_seeds_choices_and_arrivals() -> None:
    seeds = [row_seed(seed, 0, 0, choice) for seed in range(-50, 50) for choice in range(20)]
    seeds += [
        row_seed(None, engine, arrival, choice)
        for engine in range(5)
        for arrival in range(50)
        for choice in range(8)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert row_seed(3, 0, 0, 1) != row_seed(4, 0, 0, 0)


def test_a_request_seed_makes_the_arrival_number_irrelevant() -> None:
    assert row_seed(3, engine_seed=0, arrival=1) == row_seed(3, engine_seed=9, arrival=77)
    assert row_seed(None, engine_seed=0, arrival=1) != row_seed(None, engine_seed=0, arrival=2)
    assert row_seed(2**80, 0, 0) != row_seed(2**80 + 2**64, 0, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.4])
def test_argmaxes_over_shared_noise_agree_as_often_as_promised(temperature: float) -> None:
    """P(agree) >= (1 - TV) / (1 + TV), and far above independent noise."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        target_V = torch.randn(20, generator=generator)
        draft_V = target_V + 0.6 * torch.randn(20, generator=generator)
        p_V, q_V = (torch.softmax(x / temperature, 0) for x in (target_V, draft_V))
        distance = 0.5 * (p_V - q_V).abs().sum().item()
        noise = gumbel(torch.arange(20000), torch.full((20000,), 4), torch.arange(20))
        agree = ((p_V.log() + noise).argmax(1) == (q_V.log() + noise).argmax(1)).double().mean().item()
        assert agree >= (1 - distance) / (1 + distance) - 3 * 0.5 / 20000**0.5
        assert agree > (p_V * q_V).sum().item() + 0.05
        assert agree <= 1 - distance + 3 * 0.5 / 20000**0.5
