"""``kernels/step_attention.py`` against the reference and float64, on paged keys."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from paged_world import PagedWorld, counted_launches, paged, poisoned_memory
from torch import Tensor
from triton_tools import (
    FLOAT8S,
    FLOATS,
    assert_as_close,
    device_fixture,
    far_tensor,
    forbid_launches,
)

from sgl_skipkv.kernels import reference
from sgl_skipkv.kernels import step_attention as module

device = device_fixture(module)
fixtures = (poisoned_memory,)  # for every test
SCALE = 0.11


@dataclass
class Case:
    """A batch: its keys, the ring with its queries, and how many steps each request replays."""

    keys: PagedWorld
    ring: Tensor
    query_slots: list[int]
    last_positions: list[int]
    steps: list[int]
    firsts: list[int]
    causal: bool = True

    def flat(self) -> Tensor:
        """float32 [most steps, tokens], from the kernel."""
        lists = (self.query_slots, self.last_positions)
        slots, last = (torch.tensor(one, device=self.ring.device) for one in lists)
        inputs = (self.keys.paged, self.ring, slots, last, self.steps, self.firsts)
        return module.step_attention(*inputs, causal=self.causal, scale=SCALE)

    def found(self) -> list[Tensor]:
        """Per request float32 [T, n]; what lies below its last step is 0."""
        flat = self.flat()
        assert flat.dtype == torch.float32
        assert flat.shape == (max(self.steps), sum(self.keys.row_tokens))
        parts = []
        for part, steps in zip(flat.split(self.keys.row_tokens, 1), self.steps, strict=True):
            assert not part[steps:].any()
            parts.append(part[:steps])
        return parts

    def alone(self, b: int) -> Case:
        own = slice(b, b + 1)
        lists = (self.query_slots, self.last_positions, self.steps, self.firsts)
        return Case(self.keys.alone(b), self.ring, *(one[own] for one in lists), self.causal)

    def queries(self, b: int) -> Tensor:
        """float [L, T, Hq, d], oldest first."""
        newest, steps = self.last_positions[b], self.steps[b]
        entries = [p % self.ring.shape[2] for p in range(newest - steps + 1, newest + 1)]
        return self.ring[:, self.query_slots[b], entries]


def case(
    tokens: list[int],
    steps: list[int],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    ring: int = 8,
    layers: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    firsts: list[int] | None = None,
    causal: bool = True,
    query_dtype: torch.dtype | None = None,
    k_scales: list[float] | None = None,
) -> Case:
    draw = torch.Generator().manual_seed(sum(tokens) + sum(steps) + group)
    queries = torch.randn(layers, 9, ring, kv_heads * group, head_dim, generator=draw) * 2
    of_request = [torch.randn(layers, n, kv_heads, head_dim, generator=draw) * 2 for n in tokens]
    if not causal:
        for keys, count in zip(of_request, steps, strict=True):
            keys[:, -count:] = torch.nan  # nothing may come of the window's own keys
    on_device = [keys.to(dtype).to(device) for keys in of_request]
    keys = paged(on_device, seed=len(tokens), k_scales=k_scales)
    slots = torch.randperm(8, generator=draw)[: len(tokens)] + 1
    last = [n + 5 * b - 1 for b, n in enumerate(tokens)]
    queries = queries.to(query_dtype or dtype).to(device)
    firsts = firsts or [0] * len(tokens)
    return Case(keys, queries, slots.tolist(), last, steps, firsts, causal)


def truth(batch: Case, b: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[T, n] by the definition, one step after the other."""
    q, k = batch.queries(b).to(dtype), batch.keys.of_request[b].to(dtype)
    (layers, steps, query_heads, _), (n, kv_heads) = q.shape, k.shape[1:3]
    received = torch.zeros(steps, n, dtype=dtype, device=q.device)
    for t in range(steps):
        seen = slice(batch.firsts[b], n - steps + (t + 1 if batch.causal else 0))
        for layer in range(layers):
            for head in range(query_heads):
                own = k[layer, seen, head // (query_heads // kv_heads)]
                received[t, seen] += (own @ q[layer, t, head] * SCALE).softmax(0)
    return received / (layers * query_heads)


def referred(batch: Case, b: int) -> Tensor:
    """float32 [T, n], as the policies form it from the reference."""
    total: Tensor | float = 0.0
    for q, k in zip(batch.queries(b), batch.keys.of_request[b], strict=True):
        total = total + reference.causal_attention(q, k, scale=SCALE)
    assert isinstance(total, Tensor)
    return total / len(batch.keys.layers)


def assert_as_reference(batch: Case) -> None:
    for b, found in enumerate(batch.found()):
        expected = referred(batch, b) if batch.causal else truth(batch, b, torch.float32)
        assert_as_close(found, expected, truth(batch, b))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_equals_the_reference(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    """Odd lengths, one block and several, one token, other steps for each, scrambled slots."""
    batch = case([71, 9, 130, 1], [8, 3, 5, 1], dtype=dtype, head_dim=head_dim, device=device)
    assert_as_reference(batch)


@pytest.mark.parametrize("query_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOAT8S, ids=str)
@pytest.mark.parametrize("k_scales", [None, [0.25, 1.7]], ids=["unscaled", "scaled"])
def test_float8_keys(
    dtype: torch.dtype, query_dtype: torch.dtype, k_scales: list[float] | None, device: torch.device
) -> None:
    """What the cache's bytes stand for, times their layer's scale, is what is attended to."""
    kinds = {"dtype": dtype, "query_dtype": query_dtype, "k_scales": k_scales, "device": device}
    batch = case([71, 9], [4, 8], **kinds)  # type: ignore[arg-type]
    assert_as_reference(batch)
    if k_scales is not None:  # a scale is seen
        before = batch.found()[0]
        batch.keys.k_scales = None
        assert (batch.found()[0] - before).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("group", "steps"), [(1, 1), (1, 40), (3, 5), (7, 9), (16, 6), (32, 3), (5, 33)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_groups_and_tiles(group: int, steps: int, causal: bool, device: torch.device) -> None:
    """Padded groups, and steps that take several tiles; one request has fewer than the others."""
    tokens, counts = [steps + 50, steps + 1], [steps, max(1, steps // 2)]
    batch = case(tokens, counts, ring=steps, group=group, causal=causal, device=device)
    assert_as_reference(batch)


@pytest.mark.parametrize("firsts", [[0, 0, 0], [70, 5, 21], [121, 63, 33]])
def test_a_range_of_columns(firsts: list[int], device: torch.device) -> None:
    """Among them first columns inside a block and ranges of one column."""
    assert_as_reference(case([130, 72, 42], [8, 8, 8], firsts=firsts, causal=False, device=device))


def test_all_tokens_are_steps(device: torch.device) -> None:
    """The first step of a request without a prompt sees its own token only."""
    batch = case([8, 3], [8, 3], device=device)
    assert_as_reference(batch)
    assert [one[0, 0].item() for one in batch.found()] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("ring", [8, 9, 21])
def test_only_the_steps_own_queries_count(ring: int, device: torch.device) -> None:
    batch = case([60, 33], [5, 8], ring=ring, device=device)
    assert_as_reference(batch)
    taken = torch.zeros(batch.ring.shape[1:3], dtype=torch.bool, device=device)
    for slot, newest, steps in zip(
        batch.query_slots, batch.last_positions, batch.steps, strict=True
    ):
        taken[slot, [(newest - t) % ring for t in range(steps)]] = True
    before = batch.found()
    batch.ring[:, ~taken] = torch.nan
    assert all(map(torch.equal, before, batch.found())), "another query made a difference"


def test_a_broken_request_breaks_no_other(device: torch.device) -> None:
    batch = case([60, 33], [5, 8], device=device)
    before = batch.found()
    batch.ring[:, batch.query_slots[0]] = torch.nan
    broken, whole = batch.found()
    assert broken.isnan().any() and torch.equal(whole, before[1])


def test_the_bits_depend_on_nothing_else(device: torch.device) -> None:
    """Neither on the batch nor on the run."""
    batch = case([71, 130, 20], [8, 1, 3], ring=40, dtype=torch.bfloat16, device=device)
    together = batch.found()
    assert all(map(torch.equal, together, batch.found()))
    for b, found in enumerate(together):
        assert torch.equal(found, batch.alone(b).found()[0])


def test_offsets_beyond_two_to_the_31(device: torch.device) -> None:
    """Slots, page-table rows and layers of the ring whose offsets no 32-bit integer holds."""
    if device.type != "cpu":
        pytest.skip("would take 50 GB of the GPU")
    plain = case([50, 20], [8, 4], layers=3, device=device)
    slots, kv_heads, d = plain.keys.layers[0].shape
    far_slots = 2**31 // (kv_heads * d)
    far_layers = []
    for layer in plain.keys.layers:
        far = far_tensor((far_slots + slots, kv_heads, d), torch.float32, device)
        far[far_slots:] = layer
        far_layers.append(far)
    far_table = far_tensor((2**22 + 9, 600), torch.int32, device)
    for row, n in zip(plain.keys.rows.tolist(), plain.keys.row_tokens, strict=True):
        far_table[2**22 + row, :n] = plain.keys.req_to_token[row, :n] + far_slots
    entry = plain.ring.shape[2:]
    far_ring = far_tensor((3, 2**30 // entry.numel() + 9, *entry), torch.float32, device)
    far_ring[:, -9:] = plain.ring
    keys = PagedWorld(far_layers, plain.keys.of_request, far_table, plain.keys.rows + 2**22)
    query_slots = [far_ring.shape[1] - 9 + slot for slot in plain.query_slots]
    distant = dataclasses.replace(plain, keys=keys, ring=far_ring, query_slots=query_slots)
    assert all(map(torch.equal, plain.found(), distant.found()))


def test_an_empty_batch_launches_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = case([20], [8], device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    nobody = dataclasses.replace(
        batch.keys.paged, rows=none, row_tokens=[], offsets=none.new_zeros(1)
    )
    forbid_launches(monkeypatch)
    found = module.step_attention(nobody, batch.ring, none, none, [], [], causal=True, scale=SCALE)
    assert found.shape == (0, 0)


def test_two_launches_whatever_the_batch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = case([20, 50, 33], [8, 2, 5], layers=4, device=device)
    launched = counted_launches(monkeypatch)
    batch.flat()
    assert launched == ["_normaliser_kernel", "_mean_attention_kernel"]


def test_what_it_refuses(device: torch.device) -> None:
    batch = case([20, 30], [8, 8], device=device)
    for change, message in (
        ({"steps": [8, 9]}, "steps: expected 1 to 8, got 9"),
        ({"firsts": [0, 23]}, r"firsts: expected an integer in \[0, 23\), got 23"),
        ({"firsts": [12, 0], "causal": False}, r"\[0, 12\), got 12"),
        ({"steps": [0, 8]}, "steps: expected 1 to 8, got 0"),
        ({"ring": batch.ring.half()}, r"queries: expected \[torch.float32\] \[2, slots, R"),
        ({"ring": batch.ring[:1]}, r"\[2, slots, R, .* got torch.float32 \[1, 9, 8"),
        ({"ring": batch.ring[:, :, :, :3]}, "a multiple of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(batch, **change).flat()
