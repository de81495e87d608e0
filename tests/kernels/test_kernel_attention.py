"""``kernels/window_attention.py`` and ``kernels/step_attention.py`` against the reference and
float64, on paged keys, and what they load."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import kernel_bytes
import pytest
import torch
from paged_world import (
    Allocations,
    PagedWorld,
    counted_launches,
    counted_loads,
    far_away,
    nobody,
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

from sgl_skipkv.kernels import reference, step_attention, window_attention
from sgl_skipkv.kernels.paged_keys import PagedKeys

device = device_fixture(window_attention, step_attention)
fixtures = (poisoned_memory,)  # for every test
SCALE = 0.11
KINDS = pytest.mark.parametrize("kind", ["window", "steps"])


@dataclass
class Case:
    """A batch: its keys, the ring with its queries, and how many of them each request takes."""

    keys: PagedWorld
    ring: Tensor
    tracks: list[int]
    last_positions: list[int]
    counts: list[int]

    def queries(self, b: int) -> Tensor:
        """float [L, count, Hq, d], oldest first."""
        newest, count = self.last_positions[b], self.counts[b]
        entries = [p % self.ring.shape[2] for p in range(newest - count + 1, newest + 1)]
        return self.ring[:, self.tracks[b], entries]

    def alone(self, b: int) -> Any:
        lists = {name: one[b : b + 1] for name, one in vars(self).items() if isinstance(one, list)}
        return dataclasses.replace(self, keys=self.keys.alone(b), **lists)

    def inputs(self) -> tuple[Any, ...]:
        lists = (self.tracks, self.last_positions)
        return (
            self.keys.paged,
            self.ring,
            *(torch.tensor(x, device=self.ring.device) for x in lists),
        )

    def assert_as_reference(self) -> None:
        """What the kernel ``found`` for each request, the same in float32 as the policies form it
        from the reference, and in float64."""
        for b, found in enumerate(self.found()):
            assert_as_close(found, self.referred(b), self.exact(b))


@dataclass
class Window(Case):
    """float32 [n - W] of each request: attention of its newest W queries, pooled."""

    window: int
    width: int

    def found(self) -> list[Tensor]:
        flat = window_attention.window_attention(
            *self.inputs(), window=self.window, width=self.width, scale=SCALE
        )
        assert flat.dtype == torch.float32
        return [*flat.split([n - self.window for n in self.keys.row_tokens])]

    def exact(self, b: int) -> Tensor:
        """float64 [n - W], the mean over layers and KV heads."""
        q, k, width = self.queries(b), self.keys.of_request[b], self.width
        window, (layers, _, kv_heads, d) = q.shape[1], k.shape
        grouped = q.double().view(layers, window, kv_heads, -1, d)
        logits = torch.einsum("lwhgd,lnhd->lhwgn", grouped, k[:, :-window].double()) * SCALE
        importance = logits.amax(3).softmax(-1).mean(2)
        return max_pool1d(importance, width, stride=1, padding=width // 2).mean((0, 1))

    def referred(self, b: int) -> Tensor:
        q, k, width = self.queries(b), self.keys.of_request[b], self.width
        total = torch.zeros(k.shape[1] - q.shape[1], device=k.device)
        for own_q, own_k in zip(q, k, strict=True):
            each = reference.window_attention(own_q, own_k, kernel=width, scale=SCALE)
            total += each.mean(0)
        return total / len(q)


@dataclass
class Steps(Case):
    """float32 [T, n] of each request: what each of T steps gave to each token."""

    firsts: list[int]
    causal: bool = True
    over: str = "mean"

    def flat(self) -> Tensor:
        """float32 [most steps, tokens], from the kernel."""
        inputs = (*self.inputs(), self.counts, self.firsts)
        return step_attention.step_attention(
            *inputs, causal=self.causal, scale=SCALE, over=self.over
        )

    def found(self) -> list[Tensor]:
        """What lies below a request's last step is 0."""
        flat = self.flat()
        assert flat.dtype == torch.float32
        assert flat.shape == (max(self.counts), sum(self.keys.row_tokens))
        parts = []
        for part, steps in zip(flat.split(self.keys.row_tokens, 1), self.counts, strict=True):
            assert not part[steps:].any()
            parts.append(part[:steps])
        return parts

    def exact(self, b: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """By the definition, one step after the other."""
        q, k = self.queries(b).to(dtype), self.keys.of_request[b].to(dtype)
        (layers, steps, query_heads, _), (n, kv_heads) = q.shape, k.shape[1:3]
        rows = torch.zeros(layers, query_heads, steps, n, dtype=dtype, device=q.device)
        for t in range(steps):
            seen = slice(self.firsts[b], n - steps + (t + 1 if self.causal else 0))
            for layer in range(layers):
                for head in range(query_heads):
                    own = k[layer, seen, head // (query_heads // kv_heads)]
                    rows[layer, head, t, seen] = (own @ q[layer, t, head] * SCALE).softmax(0)
        if self.over == "mean":
            return rows.mean((0, 1))
        of_heads = rows.unflatten(1, (kv_heads, -1)).amax(2)
        return of_heads.mean((0, 1)) if self.over == "group_max" else of_heads.amax((0, 1))

    def referred(self, b: int) -> Tensor:
        if not self.causal:
            return self.exact(b, torch.float32)
        each = zip(self.queries(b), self.keys.of_request[b], strict=True)
        asked = {"scale": SCALE, "over": self.over}
        rows = torch.stack([reference.causal_attention(q, k, **asked) for q, k in each])
        return rows.amax(0) if self.over == "max" else rows.sum(0) / len(rows)


def case(
    kind: str,
    tokens: list[int],
    counts: int | list[int] = 8,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    ring: int | None = None,
    layers: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    width: int = 7,
    firsts: list[int] | None = None,
    causal: bool = True,
    query_dtype: torch.dtype | None = None,
    k_scales: list[float] | None = None,
) -> Any:
    """``width`` is that of the pool, ``firsts`` are the first columns of the steps."""
    counts = [counts] * len(tokens) if isinstance(counts, int) else counts
    draw = torch.Generator().manual_seed(sum(tokens) + max(counts) + group)
    entries = max(counts) if ring is None else ring
    queries = torch.randn(layers, 9, entries, kv_heads * group, head_dim, generator=draw) * 2
    of_request = [torch.randn(layers, n, kv_heads, head_dim, generator=draw) * 2 for n in tokens]
    if kind == "window" or not causal:
        for keys, count in zip(of_request, counts, strict=True):
            keys[:, -count:] = torch.nan  # nothing may come of the window's own keys
    on_device = [keys.to(dtype).to(device) for keys in of_request]
    world = paged(on_device, seed=len(tokens), k_scales=k_scales)
    tracks = (torch.randperm(8, generator=draw)[: len(tokens)] + 1).tolist()
    last = [n + 5 * b - 1 for b, n in enumerate(tokens)]
    given = (world, queries.to(query_dtype or dtype).to(device), tracks, last, counts)
    if kind == "window":
        return Window(*given, counts[0], width)
    return Steps(*given, firsts or [0] * len(tokens), causal)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@KINDS
def test_it_equals_the_reference(
    kind: str, dtype: torch.dtype, head_dim: int, device: torch.device
) -> None:
    """Odd lengths, one block and several, a single candidate or token, other steps for each,
    scrambled slots and rows."""
    tokens, counts = ([71, 9, 130], 8) if kind == "window" else ([71, 9, 130, 1], [8, 3, 5, 1])
    case(kind, tokens, counts, dtype=dtype, head_dim=head_dim, device=device).assert_as_reference()


@pytest.mark.parametrize("query_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOAT8S, ids=str)
@pytest.mark.parametrize("k_scales", [None, [0.25, 1.7]], ids=["unscaled", "scaled"])
@KINDS
def test_float8_keys(
    kind: str, dtype: torch.dtype, query_dtype: torch.dtype, k_scales: Any, device: torch.device
) -> None:
    """What the cache's bytes stand for, times their layer's scale, is what is attended to."""
    asked = {"dtype": dtype, "query_dtype": query_dtype, "k_scales": k_scales}
    batch = case(kind, [71, 9], [4, 8] if kind == "steps" else 8, device=device, **asked)
    batch.assert_as_reference()
    if k_scales is not None:  # a scale is seen
        before = batch.found()[0]
        batch.keys.k_scales = None
        assert (batch.found()[0] - before).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("kind", "tokens", "counts", "shape"),
    [
        # padded groups and windows, and windows that take several products per block of keys
        *(
            ("window", [window + 50, window + 1], window, {"group": group})
            for group, window in ((1, 1), (1, 8), (3, 5), (7, 8), (16, 8), (2, 33), (5, 40))
        ),
        # padded groups, and steps that take several tiles; one request has fewer than the others
        *(
            ("steps", [n + 50, n + 1], [n, max(1, n // 2)], {"group": group, "causal": causal})
            for group, n in ((1, 1), (1, 40), (3, 5), (7, 9), (16, 6), (32, 3), (5, 33))
            for causal in (True, False)
        ),
        # pools of every width, among them some wider than the request
        *(("window", [90, 30, 75], 8, {"width": width}) for width in (1, 3, 63, 255)),
        # more heads than the pool takes at once
        ("window", [40, 75], 8, {"layers": 3, "kv_heads": 7, "group": 1}),
        # ranges of columns: first columns inside a block and ranges of one column
        *(
            ("steps", [130, 72, 42], 8, {"firsts": firsts, "causal": False})
            for firsts in ([0, 0, 0], [70, 5, 21], [121, 63, 33])
        ),
    ],
    ids=str,
)
def test_shapes(
    kind: str, tokens: list[int], counts: Any, shape: dict[str, Any], device: torch.device
) -> None:
    case(kind, tokens, counts, **shape, device=device).assert_as_reference()


@pytest.mark.parametrize("over", ["group_max", "max"])
@pytest.mark.parametrize("group", [1, 3])
def test_maxima_over_rows(over: str, group: int, device: torch.device) -> None:
    """Over the query heads of a KV head, and over all: padded groups, several tiles and blocks; a
    request gets what it gets alone, and NaN is not lost."""
    plain = case("steps", [70, 20], [9, 3], group=group, device=device)
    batch = dataclasses.replace(plain, over=over)
    batch.assert_as_reference()
    together = batch.found()
    assert all(torch.equal(one, batch.alone(b).found()[0]) for b, one in enumerate(together))
    batch.ring[1, batch.tracks[1], :, 0] = torch.nan
    whole, broken = batch.found()
    assert torch.equal(whole, together[0]) and broken.isnan().any(1).all()


def test_all_tokens_are_steps(device: torch.device) -> None:
    """The first step of a request without a prompt sees its own token only."""
    batch = case("steps", [8, 3], [8, 3], device=device)
    batch.assert_as_reference()
    assert [one[0, 0].item() for one in batch.found()] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("ring", [8, 9, 21])
@KINDS
def test_only_the_newest_queries_count(kind: str, ring: int, device: torch.device) -> None:
    batch = case(kind, [60, 33], 8 if kind == "window" else [5, 8], ring=ring, device=device)
    batch.assert_as_reference()
    taken = torch.zeros(batch.ring.shape[1:3], dtype=torch.bool, device=device)
    for track, newest, count in zip(batch.tracks, batch.last_positions, batch.counts, strict=True):
        taken[track, [(newest - back) % ring for back in range(count)]] = True
    before = batch.found()
    batch.ring[:, ~taken] = torch.nan
    assert all(map(torch.equal, before, batch.found())), "another query made a difference"


def test_a_broken_request_breaks_no_other(device: torch.device) -> None:
    batch = case("steps", [60, 33], [5, 8], device=device)
    before = batch.found()
    batch.ring[:, batch.tracks[0]] = torch.nan
    broken, whole = batch.found()
    assert broken.isnan().any() and torch.equal(whole, before[1])


@KINDS
def test_the_bits_depend_on_nothing_else(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on the batch, nor on how many programs share the work, nor on the run."""
    counts = 8 if kind == "window" else [8, 1, 3]
    batch = case(kind, [71, 130, 20], counts, ring=40, dtype=torch.bfloat16, device=device)
    together = batch.found()
    for programs in (1, 5, batch.keys.paged.tasks):
        monkeypatch.setattr(PagedKeys, "programs", lambda *_, one=programs: one)
        assert all(map(torch.equal, together, batch.found()))
    for b, found in enumerate(together):
        assert torch.equal(found, batch.alone(b).found()[0])


@pytest.mark.parametrize("window", [8, 33])
def test_every_key_is_loaded_once(window: int, device: torch.device) -> None:
    """Counted where the interpreter loads: each candidate's key once per layer, others never."""
    tokens = [71, window + 1, 150]
    batch = case("window", tokens, window, group=4, dtype=torch.float16, device=device)
    with counted_loads(batch.keys.layers) as counts:
        batch.found()
    expected = torch.zeros(batch.keys.layers[0].shape[0], dtype=torch.int64)
    for row, n in zip(batch.keys.rows, tokens, strict=True):
        expected[batch.keys.req_to_token[row, : n - window].long()] = 1
    loaded_bytes = sum(int(count.sum()) for count in counts) * 2
    floor = 2 * 2 * sum(n - window for n in tokens) * 16 * 2  # layers, KV heads, numbers, bytes
    assert 0 < loaded_bytes <= 1.1 * floor
    for count in counts:
        assert torch.equal(count, expected[:, None, None].expand(count.shape))


def test_the_count_sees_a_second_load(device: torch.device) -> None:
    """The test above can fail: a request named twice is loaded twice."""
    batch = case("window", [40], device=device)
    batch.keys.of_request *= 2
    batch.keys.rows = batch.keys.rows.repeat(2)
    twice = Window(batch.keys, batch.ring, [1, 2], [39, 39], [8, 8], 8, 7)
    with counted_loads(batch.keys.layers) as counts:
        twice.found()
    assert int(counts[0].max()) == 2


@KINDS
def test_offsets_beyond_two_to_the_31(kind: str, device: torch.device) -> None:
    """Slots, page-table rows and layers of the ring whose offsets no 32-bit integer holds."""
    plain = case(kind, [50, 20], 8 if kind == "window" else [8, 4], layers=3, device=device)
    keys, entry = far_away(plain.keys), plain.ring.shape[2:]
    ring = far_tensor((3, 2**30 // entry.numel() + 9, *entry), torch.float32, device)
    ring[:, -9:] = plain.ring
    tracks = [ring.shape[1] - 9 + track for track in plain.tracks]
    distant = dataclasses.replace(plain, keys=keys, ring=ring, tracks=tracks)
    assert all(map(torch.equal, plain.found(), distant.found()))


def test_an_empty_batch_launches_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = case("steps", [20], device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    inputs = (nobody(batch.keys), batch.ring, none, none)
    forbid_launches(monkeypatch)
    found = step_attention.step_attention(*inputs, [], [], causal=True, scale=SCALE)
    assert found.shape == (0, 0)
    found = window_attention.window_attention(*inputs, window=8, width=7, scale=SCALE)
    assert found.shape == (0,)


@KINDS
def test_two_launches_whatever_the_batch(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = 8 if kind == "window" else [8, 2, 5]
    batch = case(kind, [20, 50, 33], counts, layers=4, device=device)
    launched = counted_launches(monkeypatch)
    batch.found()
    expected = {"window": "_importance_kernel _pool_kernel"}
    expected["steps"] = "_normaliser_kernel _mean_attention_kernel"
    assert launched == expected[kind].split()


@KINDS
def test_what_it_refuses(kind: str, device: torch.device) -> None:
    batch = case(kind, [20, 30], device=device)
    of_both: list[tuple[dict[str, Any], str]] = [
        ({"ring": batch.ring.half()}, r"queries: expected \[torch.float32\] \[2, tracks, R"),
        ({"ring": batch.ring[:1]}, r"\[2, tracks, R, .* got torch.float32 \[1, 9, 8"),
        ({"ring": batch.ring[:, :, :, :3]}, "a multiple of 2"),
    ]
    of_one: dict[str, list[tuple[dict[str, Any], str]]] = {
        "window": [
            ({"window": 20}, "window: expected 1 to 8 queries, got 20"),
            ({"ring": torch.cat([batch.ring] * 3, 2), "window": 20}, "more than 20, got 20"),
        ],
        "steps": [
            ({"counts": [8, 9]}, "steps: expected 1 to 8, got 9"),
            ({"counts": [0, 8]}, "steps: expected 1 to 8, got 0"),
            ({"firsts": [0, 23]}, r"firsts: expected an integer in \[0, 23\), got 23"),
            ({"firsts": [12, 0], "causal": False}, r"\[0, 12\), got 12"),
        ],
    }
    for change, message in of_both + of_one[kind]:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(batch, **change).found()


def test_a_long_request_gets_fewer_scratches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same scores of fewer programs, one at the least; and the stated workspace is what it
    takes, besides the output."""
    tokens, shape = [71, 9, 130], {"window": 8, "layers": 2, "kv_heads": 2, "programs": 3}
    batch = case("window", tokens, device=device)
    monkeypatch.setattr(PagedKeys, "programs", lambda *_: 3)
    expected, one, stated = batch.found(), 4 * 8 * (130 - 8), []
    for room in (module_bytes := window_attention._SCRATCH_BYTES, 2 * one, 2 * one - 1, 0):
        monkeypatch.setattr(window_attention, "_SCRATCH_BYTES", room)
        with Allocations() as taken:
            found = batch.found()
        stated.append(kernel_bytes.window_attention(tokens, **shape))
        assert taken.total_bytes == stated[-1] + 4 * sum(map(len, found))
        assert all(map(torch.equal, found, expected))
    assert module_bytes > 2 * one and stated[1] - stated[2] == one and stated[2] == stated[3]
