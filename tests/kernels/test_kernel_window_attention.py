"""``kernels/window_attention.py`` against the reference, on paged keys, and what it loads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from paged_world import (
    Allocations,
    PagedWorld,
    counted_launches,
    counted_loads,
    paged,
    poisoned_memory,
)
from torch import Tensor
from torch.nn.functional import max_pool1d
from triton_tools import (
    FLOAT8S,
    FLOATS,
    assert_as_close,
    device_fixture,
    far_tensor,
    forbid_launches,
)

from bench.kernels import workspace
from sgl_skipkv.kernels import reference
from sgl_skipkv.kernels import window_attention as module

device = device_fixture(module)
fixtures = (poisoned_memory,)  # for every test
SCALE = 0.11


@dataclass
class Case:
    """A batch: its keys, the ring with its queries, and what each request asks for."""

    keys: PagedWorld
    ring: Tensor
    query_slots: list[int]
    last_positions: list[int]
    widths: list[int]
    window: int

    def found(self, **options: Any) -> list[Tensor]:
        """Per request float32 [n - W], from the kernel."""
        ring, tokens = self.ring, self.keys.row_tokens
        flat = module.window_attention(
            self.keys.paged,
            ring,
            torch.tensor(self.query_slots, device=ring.device),
            torch.tensor(self.last_positions, device=ring.device),
            torch.tensor(self.widths, dtype=torch.int32, device=ring.device),
            window=self.window,
            scale=SCALE,
            **options,
        )
        assert flat.dtype == torch.float32
        return [*flat.split([n - self.window for n in tokens])]

    def alone(self, b: int) -> Case:
        return Case(
            self.keys.alone(b),
            self.ring,
            self.query_slots[b : b + 1],
            self.last_positions[b : b + 1],
            self.widths[b : b + 1],
            self.window,
        )

    def queries(self, b: int) -> Tensor:
        """float [L, W, Hq, d], by the position of each."""
        newest = self.last_positions[b]
        entries = [p % self.ring.shape[2] for p in range(newest - self.window + 1, newest + 1)]
        return self.ring[:, self.query_slots[b], entries]


def case(
    tokens: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
    window: int = 8,
    ring: int | None = None,
    layers: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    widths: list[int] | None = None,
    query_dtype: torch.dtype | None = None,
    k_scales: list[float] | None = None,
) -> Case:
    draw = torch.Generator().manual_seed(sum(tokens) + window + group)
    ring = window if ring is None else ring
    queries = torch.randn(layers, 9, ring, kv_heads * group, head_dim, generator=draw) * 2
    of_request = [torch.randn(layers, n, kv_heads, head_dim, generator=draw) * 2 for n in tokens]
    for keys in of_request:
        keys[:, -window:] = torch.nan  # nothing may come of the window's own keys
    on_device = [keys.to(dtype).to(device) for keys in of_request]
    keys = paged(on_device, seed=len(tokens), k_scales=k_scales)
    slots = torch.randperm(8, generator=draw)[: len(tokens)] + 1
    last = [n + 5 * b - 1 for b, n in enumerate(tokens)]
    chosen = widths or [7] * len(tokens)
    queries = queries.to(query_dtype or dtype).to(device)
    return Case(keys, queries, slots.tolist(), last, chosen, window)


def exact(q: Tensor, k: Tensor, width: int) -> Tensor:
    """float64 [n - W], the mean over layers and KV heads. q: [L, W, Hq, d]; k: [L, n, Hkv, d]."""
    window, (layers, _, kv_heads, d) = q.shape[1], k.shape
    grouped = q.double().view(layers, window, kv_heads, -1, d)
    logits = torch.einsum("lwhgd,lnhd->lhwgn", grouped, k[:, :-window].double()) * SCALE
    importance = logits.amax(3).softmax(-1).mean(2)
    return max_pool1d(importance, width, stride=1, padding=width // 2).mean((0, 1))


def referred(q: Tensor, k: Tensor, width: int) -> Tensor:
    """float32 [n - W], as the policies form it from the reference."""
    total = torch.zeros(k.shape[1] - q.shape[1], device=k.device)
    for own_q, own_k in zip(q, k, strict=True):
        each = reference.window_attention(own_q, own_k, kernel=width, scale=SCALE)
        total += each.mean(0)
    return total / len(q)


def assert_as_reference(batch: Case, **options: Any) -> None:
    for b, found in enumerate(batch.found(**options)):
        inputs = (batch.queries(b), batch.keys.of_request[b], batch.widths[b])
        assert_as_close(found, referred(*inputs), exact(*inputs))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_equals_the_reference(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    """Odd lengths, one block and several, a single candidate, scrambled slots and rows."""
    assert_as_reference(case([71, 9, 130], dtype=dtype, head_dim=head_dim, device=device))


@pytest.mark.parametrize("query_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOAT8S, ids=str)
@pytest.mark.parametrize("k_scales", [None, [0.25, 1.7]], ids=["unscaled", "scaled"])
def test_float8_keys(
    dtype: torch.dtype, query_dtype: torch.dtype, k_scales: list[float] | None, device: torch.device
) -> None:
    """What the cache's bytes stand for, times their layer's scale, is what is attended to."""
    kinds = {"dtype": dtype, "query_dtype": query_dtype, "k_scales": k_scales, "device": device}
    assert_as_reference(case([71, 9, 130], **kinds))  # type: ignore[arg-type]
    if k_scales is not None:  # a scale is seen
        batch = case([71], **kinds)  # type: ignore[arg-type]
        batch.keys.k_scales = None
        assert (
            batch.found()[0] - exact(batch.queries(0), batch.keys.of_request[0], 7)
        ).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("group", "window"), [(1, 1), (1, 8), (3, 5), (7, 8), (16, 8), (2, 33), (5, 40)]
)
def test_groups_and_windows(group: int, window: int, device: torch.device) -> None:
    """Padded groups and windows, and windows that take several products per block of keys."""
    assert_as_reference(case([window + 50, window + 1], window=window, group=group, device=device))


@pytest.mark.parametrize("widths", [[1, 3, 7], [63, 255, 5]])
def test_each_request_has_its_own_pool(widths: list[int], device: torch.device) -> None:
    """Among them pools wider than the request."""
    assert_as_reference(case([90, 30, 75], widths=widths, device=device))


@pytest.mark.parametrize("ring", [8, 9, 21])
def test_the_newest_queries_of_a_longer_ring(ring: int, device: torch.device) -> None:
    batch = case([60, 33], ring=ring, device=device)
    assert_as_reference(batch)
    taken = torch.zeros(batch.ring.shape[1:3], dtype=torch.bool, device=device)
    for b, newest in enumerate(batch.last_positions):
        taken[batch.query_slots[b], [(newest - w) % ring for w in range(8)]] = True
    before = batch.found()
    batch.ring[:, ~taken] = torch.nan
    assert all(map(torch.equal, before, batch.found())), "another query made a difference"


def test_more_heads_than_the_pool_takes_at_once(device: torch.device) -> None:
    assert_as_reference(case([40, 75], layers=3, kv_heads=7, group=1, device=device))


def test_the_bits_depend_on_nothing_else(device: torch.device) -> None:
    """Neither on the batch, nor on how many programs share the work, nor on the run."""
    batch = case([71, 130, 20], dtype=torch.bfloat16, device=device)
    together = batch.found()
    for programs in (1, 5, 1000):
        assert all(map(torch.equal, together, batch.found(programs=programs)))
    for b, found in enumerate(together):
        assert torch.equal(found, batch.alone(b).found()[0])


@pytest.mark.parametrize("window", [8, 33])
def test_every_key_is_loaded_once(window: int, device: torch.device) -> None:
    """Counted where the interpreter loads: each candidate's key once per layer, others never."""
    if device.type != "cpu":
        pytest.skip("a GPU does not say what it loads")
    batch = case([71, window + 1, 150], window=window, group=4, dtype=torch.float16, device=device)
    with counted_loads(batch.keys.layers) as counts:
        batch.found()
    expected = torch.zeros(batch.keys.layers[0].shape[0], dtype=torch.int64)
    for row, n in zip(batch.keys.rows, batch.keys.row_tokens, strict=True):
        expected[batch.keys.req_to_token[row, : n - window].long()] = 1
    loaded_bytes = sum(int(count.sum()) for count in counts) * 2
    candidates = sum(n - window for n in batch.keys.row_tokens)
    floor = 2 * 2 * candidates * 16 * 2  # layers, KV heads, numbers, bytes
    assert 0 < loaded_bytes <= 1.1 * floor
    for count in counts:
        assert torch.equal(count, expected[:, None, None].expand(count.shape))


def test_the_count_sees_a_second_load(device: torch.device) -> None:
    """The test above can fail: a request named twice is loaded twice."""
    if device.type != "cpu":
        pytest.skip("a GPU does not say what it loads")
    batch = case([40], device=device)
    batch.keys.of_request *= 2
    batch.keys.rows = batch.keys.rows.repeat(2)
    twice = Case(batch.keys, batch.ring, [1, 2], [39, 39], [7, 7], 8)
    with counted_loads(batch.keys.layers) as counts:
        twice.found()
    assert int(counts[0].max()) == 2


def test_offsets_beyond_two_to_the_31(device: torch.device) -> None:
    """Slots, page-table rows and layers of the ring whose offsets no 32-bit integer holds."""
    if device.type != "cpu":
        pytest.skip("would take 50 GB of the GPU")
    plain = case([50, 20], layers=3, device=device)
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
    distant = Case(keys, far_ring, query_slots, plain.last_positions, plain.widths, 8)
    assert all(map(torch.equal, plain.found(), distant.found()))


def test_an_empty_batch_launches_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = case([20], device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    nobody = dataclasses.replace(
        batch.keys.paged, rows=none, row_tokens=[], offsets=none.new_zeros(1)
    )
    forbid_launches(monkeypatch)
    found = module.window_attention(
        nobody, batch.ring, none, none, none.int(), window=8, scale=SCALE
    )
    assert found.shape == (0,)


def test_two_launches_whatever_the_batch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = case([20, 50, 33], layers=4, device=device)
    launched = counted_launches(monkeypatch)
    batch.found()
    assert launched == ["_importance_kernel", "_pool_kernel"]


def test_what_it_refuses(device: torch.device) -> None:
    batch = case([20, 30], device=device)
    for change, message in (
        ({"window": 20}, "window: expected 1 to 8 queries, got 20"),
        ({"ring": batch.ring.half()}, r"queries: expected \[torch.float32\] \[2, slots, R"),
        ({"ring": batch.ring[:1]}, r"\[2, slots, R, .* got torch.float32 \[1, 9, 8"),
        ({"ring": batch.ring[:, :, :, :3]}, "a multiple of 2"),
        ({"ring": torch.cat([batch.ring] * 3, 2), "window": 20}, "more than 20, got 20"),
    ):
        with pytest.raises(ValueError, match=message):
            Case(**{**vars(batch), **change}).found()


def test_the_stated_workspace_is_what_it_takes(device: torch.device) -> None:
    """And besides it nothing but the output."""
    batch = case([71, 9, 130], device=device)
    with Allocations() as taken:
        found = batch.found(programs=3)
    stated = workspace.window_attention([71, 9, 130], window=8, layers=2, kv_heads=2, programs=3)
    assert taken.total_bytes == stated + 4 * sum(map(len, found))


def test_a_long_request_gets_fewer_scratches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same scores of fewer programs; one at the least."""
    tokens, shape = [71, 9, 130], {"window": 8, "layers": 2, "kv_heads": 2, "programs": 3}
    batch = case(tokens, device=device)
    expected = batch.found(programs=3)
    one = 4 * 8 * (130 - 8)
    stated = []
    for room in (2 * one, 2 * one - 1, 0):
        monkeypatch.setattr(module, "_SCRATCH_BYTES", room)
        with Allocations() as taken:
            found = batch.found(programs=3)
        stated.append(workspace.window_attention(tokens, **shape))
        assert taken.total_bytes == stated[-1] + 4 * sum(map(len, found))
        assert all(map(torch.equal, found, expected))
    assert stated[0] - stated[1] == one and stated[1] == stated[2]
