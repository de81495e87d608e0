"""Ranks keep what one process with all heads keeps, and fail together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from device_ops import NoHostRead
from kernels_on_cpu import on_triton
from rank_world import on_ranks
from synthetic import Call, SyntheticServer, decode_until_due, unlike

from sgl_skipkv.eviction import compactor, in_parts, planner, replay, scoring
from sgl_skipkv.eviction.agreement import Agreement, DisagreementError
from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.policy import names, policy_class
from sgl_skipkv.policy.inputs import values_of_ranks
from sgl_skipkv.policy.random import Random
from sgl_skipkv.ranks import ONE_RANK, Ranks, RanksError

SCORED = [name for name in names() if name != "full"]
#: these depend on no head, so no rank can tell another that it failed
WITHOUT_GATHER = [name for name in SCORED if policy_class(name).over_ranks is None]
PARAMETERS: dict[str, dict[str, Any]] = {
    **{name: {"alpha": 0.02} for name in ("raas", "lazy")},
    **{name: {"tau": 0.2} for name in ("skipkv", "skipkv+")},
    **{"tova": {"coverage": 0.8}, "h2o": {"coverage": 0.8}},
}
SMALL: dict[str, Any] = {
    **{"retraction_backup_bytes": 1 << 16, "kv_reuse_bytes": 1 << 16},
    **{"max_sentences": 40, "check_agreement": True},
}
Plant = Callable[[Ranks], None]


def lives(
    ranks: Ranks,
    policies: Sequence[str],
    plant: Plant | None = None,
    *,
    steps: int = 90,
    device: torch.device | None = None,
) -> dict[str, tuple[list[list[int]], str | None]]:
    """Of a request of each policy, side by side: its kept sets and its failure."""
    if plant is not None:
        plant(ranks)
    count = len(policies)
    sizes = {"rows": count, "tracks": count, "pool_tokens": 4000}
    debug = {"check_ledger": device is None}  # which waits for a device
    server = SyntheticServer(**sizes, ranks=ranks, device=device, **SMALL, **debug)
    calls = unlike(server, [(name, PARAMETERS.get(name, {})) for name in policies])
    for _ in range(steps):
        running = [call for call in calls if call.state.failure is None]
        server.decode(*running)
    return {name: _told(call) for name, call in zip(policies, calls, strict=True)}


def _told(call: Call) -> tuple[list[list[int]], str | None]:
    return call.compactions, call.state.failure


def _with_quotas(ranks: Ranks, policies: Sequence[str]) -> list[tuple[Any, str | None]]:
    server = SyntheticServer(rows=len(policies), tracks=len(policies), ranks=ranks, **SMALL)
    calls = unlike(server, [(name, {"quotas": True}) for name in policies])
    for _ in range(90):
        server.decode(*calls)
    return [_told(call) for call in calls]


def test_quotas_rank_the_scores_of_all_heads() -> None:
    policies = ["rkv", "keydiff", "vase", "triattention", "distinct", "streaming"]
    first, second = on_ranks(2, _with_quotas, policies)
    assert first == second == _with_quotas(ONE_RANK, policies)
    assert all(len(kept) >= 3 and failure is None for kept, failure in first)


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[list[list[int]], str | None]]:
    return lives(ONE_RANK, SCORED)


def test_ranks_keep_what_one_process_keeps(alone) -> None:
    first, second = on_ranks(2, lives, SCORED)
    assert first == second
    for name, (kept, failure) in alone.items():
        assert first[name] == (kept, failure) and failure is None and len(kept) >= 3, name


@pytest.mark.parametrize(("tokens", "numbers"), [(1, 2**23), (7, 2**23), (512, 600)])
def test_blocks_of_values_change_nothing(tokens: int, numbers: int, alone) -> None:
    def small(ranks: Ranks) -> None:
        values_of_ranks.BLOCK_TOKENS, values_of_ranks.BLOCK_NUMBERS = tokens, numbers

    assert on_ranks(2, lives, ["distinct"], small)[1] == on_ranks(2, lives, ["distinct"])[0]


def test_a_long_row_is_gathered_in_smaller_blocks() -> None:
    """As of a conversation that is computed again; every pair once, and the last token is one."""
    _, *blocks = values_of_ranks.numbers_of_ranks([100_000])
    assert max(blocks) <= 2**23 and sum(blocks) >= 100_000 * 99_999 // 2
    assert values_of_ranks.numbers_of_ranks([1, 1153]) == [2308, 512 * 1153, 512 * 641, 128 * 129]


def _watched(ranks: Ranks, policies: Sequence[str]) -> int:
    """Compactions in which nothing that waits for a device was started."""
    server = SyntheticServer(rows=1, tracks=1, ranks=ranks, check_ledger=False, **SMALL)
    for name in policies:
        (call,) = unlike(server, [(name, PARAMETERS.get(name, {}))])
        for _ in range(2):
            decode_until_due(server, [call])
            compact = server.compaction_of([call])
            with NoHostRead():
                done = compact()
            server.book(done, [call])
        server.finish(call)
    return len(policies)


def test_no_operation_of_a_compaction_reads_the_device() -> None:
    assert on_ranks(2, _watched, SCORED) == [len(SCORED)] * 2


def _by_kernels(ranks: Ranks, policies: Sequence[str]) -> Any:
    with on_triton():
        return lives(ranks, policies, steps=70)


@pytest.mark.slow
def test_kernels_score_each_rank_s_heads() -> None:
    policies = ["skipkv", "vase", "raas"]
    first, second = on_ranks(2, _by_kernels, policies)
    assert first == second == _by_kernels(ONE_RANK, policies)
    assert all(kept and failure is None for kept, failure in first.values())


# --- a rank that fails ---------------------------------------------------------------------------


def failing(owner: Any, name: str, *, once: bool) -> None:
    """Let this function raise, once or always."""
    original, failed = getattr(owner, name), []

    def raising(*args: Any, **kwargs: Any) -> Any:
        if not (once and failed):
            failed.append(True)
            raise torch.OutOfMemoryError("planted")
        return original(*args, **kwargs)

    setattr(owner, name, raising)


@pytest.mark.parametrize(
    ("name", "once"),
    [
        *((name, True) for name in SCORED if name not in WITHOUT_GATHER),
        *(("distinct", False), ("skipkv", False)),
    ],
)
def test_a_rank_that_cannot_score_ends_the_request_on_all(name: str, once: bool, alone) -> None:
    def plant(ranks: Ranks) -> None:
        if ranks.index == 1:
            failing(policy_class(name), "scores_together", once=once)

    others = [other for other in ("tova", "vase", "distinct", "raas") if other != name]
    first, second = on_ranks(2, lives, [name, *others], plant)
    assert first == second
    assert "not finite" in str(first[name][1])
    for other in others:
        assert first[other][1] is None and len(first[other][0]) >= 3


def test_scores_of_another_shape_end_the_request_on_all() -> None:
    def plant(ranks: Ranks) -> None:
        snapkv, scores = policy_class("snapkv"), policy_class("snapkv").scores
        snapkv.scores = lambda self, inputs: scores(self, inputs)[ranks.index :]  # type: ignore

    first, second = on_ranks(2, lives, ["snapkv", "tova"], plant)
    assert first == second and "not finite" in str(first["snapkv"][1])
    assert first["tova"][1] is None and len(first["tova"][0]) >= 3


FOLLOWING = ["h2o", "raas", "lazy", "gkv", "crystal"]


@pytest.mark.parametrize("place", ["replayed_attention", "follow"])
@pytest.mark.parametrize("once", [True, False])
def test_a_rank_that_cannot_follow_attention_ends_the_requests_on_all(
    place: str, once: bool
) -> None:
    def plant(ranks: Ranks) -> None:
        if ranks.index != 1:
            return
        if place == "follow":
            for name in FOLLOWING:
                failing(policy_class(name), place, once=once)
        else:
            failing(replay, place, once=once)

    first, second = on_ranks(2, lives, [*FOLLOWING, "skipkv"], plant)
    assert first == second
    failed = {name for name in FOLLOWING if first[name][1] is not None}
    assert failed == set(FOLLOWING) if place == "follow" or not once else len(failed) == 1
    assert first["skipkv"][1] is None


def test_a_rank_that_cannot_measure_coverage_ends_the_request_on_all() -> None:
    def plant(ranks: Ranks) -> None:
        if ranks.index == 1:
            failing(replay, "replayed_attention", once=False)

    first, second = on_ranks(2, lives, ["tova", "skipkv"], plant)
    assert first == second
    assert "coverage" in str(first["tova"][1]) and first["skipkv"][1] is None


@pytest.mark.parametrize("name", WITHOUT_GATHER)
def test_a_rank_that_can_tell_nobody_ends(name: str) -> None:
    def plant(ranks: Ranks) -> None:
        if ranks.index == 1:
            failing(policy_class(name), "scores_together", once=True)

    _, second = on_ranks(2, lives, [name], plant)
    assert isinstance(second, torch.OutOfMemoryError)


def test_a_rank_that_is_gone_ends_the_others() -> None:
    def plant(ranks: Ranks) -> None:
        if ranks.index == 1:
            raise SystemExit  # as a process that is killed

    first, second = on_ranks(2, lives, ["skipkv"], plant)
    assert isinstance(first, RanksError) and isinstance(second, EOFError)


# --- planted mistakes ----------------------------------------------------------------------------


def _no_gather(ranks: Ranks) -> None:
    def local(due: Any, scores: Any, ranks: Ranks, agreement: Agreement) -> None:
        agreement.compare(ranks.gathered(agreement.stamp()))

    scoring._combine = local


def _other_seed(ranks: Ranks) -> None:
    if ranks.index == 1:
        draw = Random._draw
        Random._draw = lambda self, inputs: draw(self, inputs).flip(0)  # type: ignore[method-assign]


@pytest.mark.parametrize(("policy", "plant"), [("skipkv", _no_gather), ("random", _other_seed)])
def test_the_check_sees_ranks_that_keep_different_tokens(policy: str, plant: Plant) -> None:
    assert all(isinstance(one, DisagreementError) for one in on_ranks(2, lives, [policy], plant))


def test_the_check_sees_two_requests_that_changed_places() -> None:
    """And sets of the same sum: what an order-blind checksum would miss."""
    sets = [[0, 3, 4], [0, 2, 5], [1, 2, 4]]

    def checksum(*kept: Sequence[int]) -> int:
        agreement = Agreement(torch.device("cpu"))
        none = torch.zeros(0, dtype=torch.int64)
        agreement.note([Selection(torch.tensor(one), none) for one in kept])
        return int(agreement.checksum)

    of = [checksum(*order) for order in ([*sets], [*sets[::-1]], [sets[1], sets[0], sets[2]])]
    assert len({*of, *(checksum(one) for one in sets)}) == 6


def _sums(ranks: Ranks, own_first: bool) -> list[bytes]:
    if own_first:  # as a reduction that adds what has arrived to what it has
        gathered = ranks.gathered

        def rotated(part: torch.Tensor) -> torch.Tensor:
            return gathered(part).roll(-ranks.index, dims=0)

        ranks.gathered = rotated  # type: ignore[method-assign]
    draw = torch.Generator().manual_seed(ranks.index)
    part = torch.randn(1000, generator=draw)
    return [combine(part).numpy().tobytes() for combine in (ranks.summed, ranks.mean)]


def test_sums_have_the_same_bits_on_every_rank() -> None:
    first, *others = on_ranks(3, _sums, False)
    assert all(other == first for other in others)
    first, *others = on_ranks(3, _sums, True)
    assert all(other[0] != first[0] for other in others)


def test_a_retry_of_one_rank_is_seen() -> None:
    """What fails may not be tried again by a rank alone: it would gather what nobody else does."""

    def plant(ranks: Ranks) -> None:
        compactor.in_parts = lambda due, work, *args, **sizes: in_parts.retried_alone(due, work)
        if ranks.index == 1:
            failing(planner, "scores_of_ranks", once=True)

    results = on_ranks(2, lives, ["skipkv", "snapkv"], plant)
    assert any(isinstance(one, RanksError) for one in results) or results[0] != results[1]


def test_bits_of_a_checksum_survive_the_gather() -> None:
    def stamps(ranks: Ranks) -> bool:
        agreement = Agreement(torch.device("cpu"))
        agreement.checksum.fill_(0x7FA00001_7F800001)  # two NaN, one of them signalling
        agreement.compare(ranks.gathered(torch.cat([torch.ones(1), agreement.stamp()]))[:, 1:])
        agreement.check()
        return True

    assert on_ranks(2, stamps) == [True, True]


def test_promises_are_kept_or_the_ranks_end() -> None:
    def too_few(ranks: Ranks) -> None:
        with ranks.promised([3], torch.device("cpu")):
            pass

    assert all(isinstance(one, RanksError) for one in on_ranks(2, too_few))
