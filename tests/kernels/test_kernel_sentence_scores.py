"""``kernels/sentence_scores.py`` against the policies in plain torch."""

from __future__ import annotations

import pytest
import torch
from paged_world import counted_launches, poisoned_memory
from torch import Tensor
from triton_tools import assert_as_close, device_fixture, forbid_launches

from sgl_skipkv.kernels import sentence_scores as module
from sgl_skipkv.policy.inputs.sentences import Sentences
from sgl_skipkv.policy.skipkv import sentence_penalty

device = device_fixture(module)
fixtures = (poisoned_memory,)  # for every test
WINDOW, SIGMA, TAU = 5, 0.3, 0.6
Request = tuple[Tensor, Tensor, Tensor, Sentences]


def request(tokens: int, sentences: int, seed: int, device: torch.device) -> Request:
    """Importance, redundancy, positions with gaps, and sentences of which some are gone."""
    draw = torch.Generator().manual_seed(seed)
    positions = torch.randperm(3 * tokens, generator=draw)[:tokens].sort().values
    edges = torch.randperm(3 * tokens, generator=draw)[: 2 * sentences].sort().values.view(-1, 2)
    spans = Sentences(
        edges[:, 0].contiguous().to(device),
        edges[:, 1].contiguous().to(device),
        torch.rand(sentences, generator=draw).to(device),
    )
    importance = torch.rand(tokens - WINDOW, generator=draw).to(device)
    redundancy = torch.rand(tokens, generator=draw).to(device)
    redundancy[-WINDOW:] = torch.nan  # what the window repeats does not count
    return importance, redundancy, positions.to(device), spans


def scores(requests: list[Request], ending: int) -> list[Tensor]:
    tokens = [len(positions) for _, _, positions, _ in requests]
    spans = [one for *_, one in requests]
    flat = module.sentence_scores(
        *(torch.cat([one[i] for one in requests]) for i in range(3)),
        tokens,
        torch.cat([one.starts for one in spans]),
        torch.cat([one.stops for one in spans]),
        torch.cat([one.redundancy for one in spans]),
        [len(one.starts) for one in spans],
        window=WINDOW,
        sigma=SIGMA,
        tau=TAU,
        ending=ending,
    )
    return [*flat.split(tokens)]


def expected(one: Request, ending: int, dtype: torch.dtype) -> Tensor:
    importance, redundancy, positions, sentences = one
    z = SIGMA * importance.to(dtype) - (1.0 - SIGMA) * redundancy[:-WINDOW].to(dtype)
    z = torch.nn.functional.pad(z, (0, WINDOW))
    z = z - sentence_penalty(positions, sentences, TAU)
    return z + sentences.places(positions).ending_bonus(ending)


MANY, NONE = [(300, 40), (6, 0), (257, 1), (WINDOW, 2), (33, 30)], [(20, 0), (20, 0)]


@pytest.mark.parametrize(
    ("ending", "sizes"), [(0, MANY), (1, MANY), (4, MANY), (64, MANY), (4, NONE)]
)
def test_it_is_the_score_of_the_policies(
    ending: int, sizes: list[tuple[int, int]], device: torch.device
) -> None:
    """Rows of one block and of several, no sentence, one, many, and nothing but the window."""
    batch = [request(n, count, seed, device) for seed, (n, count) in enumerate(sizes)]
    for one, found in zip(batch, scores(batch, ending), strict=True):
        truth = expected(one, ending, torch.float64)
        assert_as_close(found, expected(one, ending, torch.float32), truth)


def test_a_batch_is_each_alone_to_the_bit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one launch."""
    batch = [request(n, 9, n, device) for n in (300, 40, 77)]
    launched = counted_launches(monkeypatch)
    together = scores(batch, 4)
    assert launched == ["_sentence_scores_kernel"]
    for one, found in zip(batch, together, strict=True):
        assert torch.equal(found, scores([one], 4)[0])


def test_no_request(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    none, whole = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    forbid_launches(monkeypatch)
    found = module.sentence_scores(
        *(none, none, whole, [], whole, whole, none, []), window=1, sigma=0.5, tau=0.5, ending=0
    )
    assert found.shape == (0,)
