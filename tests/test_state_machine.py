"""Random lives of many calls on SGLang's real pools and tree, and proof that the checks bite.

``World`` (pool_world.py) is one scheduler without a model. The machine drives it with arrivals,
follow-up turns, aborts, retractions, tree evictions and flushes, and checks every invariant after
every rule. ``test_planted_bugs`` breaks our code in one place at a time; the same machine must find
each of them.
"""

from __future__ import annotations

import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from http import HTTPStatus
from types import FunctionType
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pool_books import POOL, ROWS, plugin_and_topology
from pool_world import World


@pytest.fixture(autouse=True)
def same_draws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same runs, whatever other tests have imported.

    Hypothesis likes to draw constants that it finds in the modules of the project that are loaded,
    so how often something happens in a run would depend on the rest of the session.
    """
    nothing = providers.Constants()
    monkeypatch.setattr(providers, "_get_local_constants", lambda: nothing)
    providers.CONSTANTS_CACHE.cache.clear()
    yield
    providers.CONSTANTS_CACHE.cache.clear()


MACHINE = settings(
    deadline=None,
    derandomize=True,
    database=None,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
SHARED = [5, 6, 7, 8, 9, 10, 11, 12]  # prompts begin alike, so that they share
KNOBS = {"interval": 8, "window": 2, "sink": 1}

PROMPT = st.builds(
    lambda shared, own: SHARED[:shared] + own,
    st.integers(1, len(SHARED)),
    st.lists(st.integers(3, 6), max_size=6),
)
TOKENS = st.sampled_from([1, 2, 40, 90, 150, 150])
STOPS = st.sampled_from([False, False, True])
# What a call may ask for; most calls have a budget.
BUDGETED = st.fixed_dictionaries(
    {
        "kv_budget": st.integers(4, 16),
        "kv_policy": st.sampled_from(["skipkv", "rkv", "streaming", "random"]),
        "kv_params": st.sampled_from(
            [
                KNOBS,
                {**KNOBS, "window": 1, "sink": 0},
                {**KNOBS, "protect_prompt": False},
                {**KNOBS, "protect_prompt": False, "count_prompt": True},
            ]
        ),
    }
)
ASKED = st.one_of(
    BUDGETED, BUDGETED, BUDGETED, st.just({}), st.sampled_from([{}, {"kv_policy": "full"}])
)


@pytest.fixture(scope="module", autouse=True)
def sglang() -> Iterator[None]:
    with plugin_and_topology():
        yield


class PoolMachine(RuleBasedStateMachine):
    """Everything that can happen to a scheduler's memory, in any order."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        tree_core=st.sampled_from(["rust", "python"]),
        overlap=st.booleans(),
        chunk=st.sampled_from([None, None, 5]),
        token_ratio=st.sampled_from([0.02, 0.5]),
    )
    def start(self, **how: Any) -> None:
        self.world = World(**how)

    @precondition(lambda self: len(self.world.waiting_queue) < 4)
    @rule(calls=st.lists(st.tuples(PROMPT, TOKENS, STOPS, ASKED), min_size=1, max_size=4))
    def arrive(self, calls: list[tuple[list[int], int, bool, dict[str, Any]]]) -> None:
        for prompt, max_new_tokens, ignore_eos, keys in calls:
            self.world.arrive(prompt, max_new_tokens, ignore_eos=ignore_eos, **keys)

    @precondition(lambda self: self.world.finished and len(self.world.waiting_queue) < 4)
    @rule(data=st.data(), more=st.lists(st.integers(3, 6), min_size=1, max_size=4), keys=ASKED)
    def follow_up(self, data: st.DataObject, more: list[int], keys: dict[str, Any]) -> None:
        """The next turn: a finished call's whole text and a few tokens."""
        text = self._text(data)
        self.world.arrive((text + more)[:60], 20, **keys)

    @rule(steps=st.sampled_from([1, 2, 5, 15, 40, 80]))
    def run_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()
            self.world.check()

    @precondition(lambda self: len(self.world.owners()) + len(self.world.waiting_queue) > 2)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted([*self.world.owners(), *self.world.waiting_queue], key=lambda req: req.rid)
        self.world.abort(data.draw(st.sampled_from(live)))

    @precondition(lambda self: len(self.world.running_batch.reqs) > 1)
    @rule()
    def retract(self) -> None:
        """As in SGLang's own test mode: at the next decode step, full pool or not."""
        self.world.retract_now = True
        self.world.step()

    @precondition(lambda self: self.world.owners())
    @rule()
    def pause(self) -> None:
        """Everybody is retracted, in the middle of a chunked prompt too."""
        self.world.pause()

    @rule(tokens=st.integers(1, POOL))
    def evict_tree(self, tokens: int) -> None:
        self.world.evict_tree(tokens)

    @precondition(lambda self: self.world.finished)
    @rule(data=st.data())
    def probe(self, data: st.DataObject) -> None:
        """Whatever the tree has of a finished text is that text's KV."""
        assert self.world.probe(self._text(data)) >= 0

    @rule()
    def flush(self) -> None:
        self.world.flush()

    def _text(self, data: st.DataObject) -> list[int]:
        req = data.draw(st.sampled_from(self.world.finished[-4:]))
        return [*req.origin_input_ids, *req.output_ids]

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            type(self).seen += self.world.count


def test_memory_stays_sound() -> None:
    PoolMachine.seen = Counter()
    run_state_machine_as_test(PoolMachine, settings=settings(MACHINE, max_examples=650))
    # an empty run proves nothing
    wanted = {"compactions": 800, "retractions": 200, "retractions, pool full": 5, "refused": 5}
    wanted |= {"prefix hits": 400, "finished": 400, "aborts": 500}
    wanted |= {"steps of two calls on one ring": 500}
    missed = {name: PoolMachine.seen[name] for name in wanted}
    assert {name: n for name, n in missed.items() if n < wanted[name]} == {}


@settings(MACHINE, max_examples=15)
@given(
    st.lists(
        st.tuples(PROMPT, st.integers(4, 24), st.sampled_from(["skipkv", "streaming"])),
        min_size=4,
        max_size=10,
    ),
    st.booleans(),
    st.sampled_from([None, 5]),
)
def test_admission_of_budgeted_calls_never_overbooks(
    calls: list[tuple[list[int], int, str]], overlap: bool, chunk: int | None
) -> None:
    """Traces of twice the pool, all at once: nobody is retracted, nobody is refused, all finish."""
    world = World(overlap=overlap, chunk=chunk)
    for prompt, budget, policy in calls:
        world.arrive(prompt, 2 * POOL, kv_budget=budget, kv_policy=policy, kv_params=KNOBS)
    together = 0
    for _ in range(5000):
        world.step()
        together = max(together, len(world.owners()))
        if world.is_idle():
            break
    world.check()
    assert world.count["retractions"] == 0 and not world.aborted
    assert len(world.finished) == len(calls)
    for req in world.finished:
        assert len(req.output_ids) == 2 * POOL
        assert req.skipkv.summary["peak_kv_tokens"] <= req.skipkv.settings.peak_own_tokens()
    assert together > 1


def long_calls(world: World, *lengths: int) -> list[Any]:
    """Budgeted calls that have generated this much, all running."""
    calls = []
    for i, start in enumerate(sorted(lengths, reverse=True)):
        while calls and len(calls[0].output_ids) < lengths[0] - start:
            world.step()
        keys = {"kv_budget": 8, "kv_policy": "streaming", "kv_params": KNOBS}
        calls.append(world.arrive([5, 6, 7, 20 + i], 3 * POOL, **keys))
    while len(calls[0].output_ids) < lengths[0]:
        world.step()
    return calls


@pytest.mark.parametrize("overlap", [True, False])
def test_who_cannot_come_back_stays_while_another_can_go(overlap: bool) -> None:
    """SGLang retracts the shortest output first; here the longest could not be recomputed."""
    world = World(overlap=overlap)
    long, short = long_calls(world, POOL + 20, 20)
    world.retract_now = True
    world.step()
    assert short.is_retracted and not long.is_retracted and not world.aborted
    world.check()
    world.drain()


@pytest.mark.parametrize("overlap", [True, False])
def test_who_cannot_come_back_ends_with_an_answer(overlap: bool) -> None:
    """Both traces are longer than the pool: one has to go, and must not wait for ever."""
    world = World(overlap=overlap)
    calls = long_calls(world, POOL + 20, POOL + 10)
    world.retract_now = True
    for _ in range(3):
        world.step()
        world.check()
    (refused,) = world.aborted
    assert refused in calls and not world.waiting_queue
    assert refused.skipkv.summary["compactions"] > 0 and world.runtime.open_calls == 1
    world.drain()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_call_that_cannot_be_served_ends_alone(overlap: bool) -> None:
    """With 500 and the reason; its slot, ring and KV come back, its neighbour never notices."""
    world = World(overlap=overlap)
    keys = {"kv_budget": 8, "kv_policy": "rkv", "kv_params": KNOBS}
    failing, sound = (
        world.arrive([5, 6, 7, 20 + i], 60, ignore_eos=True, **keys) for i in range(2)
    )
    while len(failing.output_ids) < 20:
        world.step()
    failing.skipkv.failure = "a score was not finite"
    before = len(failing.output_ids)
    while world.owners():
        world.step()
    assert len(sound.output_ids) == 60 and sound.finished_reason.to_json()["type"] == "length"
    ended = failing.finished_reason.to_json()
    assert (ended["type"], ended["status_code"]) == ("abort", HTTPStatus.INTERNAL_SERVER_ERROR)
    assert ended["message"].startswith(f"kv_budget call {failing.rid}: a score was not finite")
    assert before <= len(failing.output_ids) <= before + 3
    assert failing.skipkv.summary["compactions"] == 1 and sound.skipkv.summary["compactions"] > 4


# -- the machine is tested by breaking what it guards

FOUND = (AssertionError, RuntimeError, ValueError, LookupError)


def bugs() -> list[tuple[str, Callable[..., Any], str, str]]:
    """Name, our function, a piece of its source, and what stands there instead."""
    from sgl_skipkv import page_table, ring_book, runtime
    from sgl_skipkv.patches import batch, forward, release, retraction

    compact, plan = batch._compact, runtime.Runtime
    return [
        (
            "a compacted row is filed in the tree",
            release.limit_insert,
            "if state.evicted_tokens:\n        return 0",
            "if state.evicted_tokens:\n        return None",
        ),
        (
            "a recomputed call hands its output to the tree",
            release.limit_insert,
            "return state.prompt_tokens if result is None else min(result, state.prompt_tokens)",
            "return None",
        ),
        (
            "a recomputed call shares more than its prompt",
            retraction.limit_prefix_match,
            "return min(max_prefix_len, shareable)",
            "return None",
        ),
        (
            "allocated length stays",
            compact,
            "req.kv.kv_allocated_len -= plan.evicted_tokens",
            "pass",
        ),
        (
            "committed length stays",
            compact,
            "req.kv.kv_committed_len -= plan.evicted_tokens",
            "pass",
        ),
        (
            "sequence lengths stay",
            compact,
            "batch.seq_lens_cpu - torch.tensor(evicted)",
            "batch.seq_lens_cpu",
        ),
        ("device lengths stay", compact, "batch.seq_lens = ", "_ = "),
        (
            "slots are freed twice",
            compact,
            "        allocator.free(slots)\n",
            "        allocator.free(slots)\n        allocator.free(slots)\n",
        ),
        ("slots are not freed", compact, "        allocator.free(slots)\n", "        pass\n"),
        ("one slot is forgotten", page_table.compact_row, "return freed", "return freed[1:]"),
        (
            "the slot before the first evicted one is freed",
            page_table.compact_row,
            "return freed",
            "return torch.cat([kept[-1:].to(torch.int64), freed[1:]])",
        ),
        (
            "the kept slots are written one entry too far",
            page_table.compact_row,
            "req_to_token[row, :keep_tokens] = kept",
            "req_to_token[row, 1 : keep_tokens + 1] = kept",
        ),
        (
            "the prompt may go although the tree owns it",
            plan._protected,
            "prompt = state.prompt_tokens if params.protect_prompt else 0",
            "prompt = 0",
        ),
        (
            "an evictable prompt is shared",
            retraction.limit_prefix_match,
            "shareable = 0 if state.keeps_prompt_private else state.prompt_tokens",
            "shareable = state.prompt_tokens",
        ),
        (
            "state outlives a retraction",
            retraction.reset_call,
            "state.runtime.retract(state, generated=len(req.output_ids))",
            "pass",
        ),
        (
            "evictions outlive a retraction",
            plan.retract,
            "state.evicted_tokens, state.last = 0, None",
            "pass",
        ),
        (
            "a finished call keeps its slot",
            release.close_call,
            "state.runtime.close(state, row_tokens, req.output_ids_through_stop, reason)",
            "pass",
        ),
        ("a row keeps its slot", plan._release, "of_row[state.row] = 0", "of_row[0] = 0"),
        (
            "positions are physical",
            forward.prepare_forward,
            "positions = result.orig_seq_lens - 1",
            "positions = batch.seq_lens - 1",
        ),
        (
            "a compaction comes a step too late",
            plan.due,
            "return state.own_tokens(row_tokens) >= state.due_tokens",
            "return state.own_tokens(row_tokens) > state.due_tokens + 1",
        ),
        (
            "a call reserves a slot that is taken",
            plan.has_slot,
            "return self.recorder.slots.free_slots > taken",
            "return True",
        ),
        (
            "two calls record on one ring in the same step",
            ring_book.RingBook.fits,
            "any(not ring & steps for ring in booked)",
            "True",
        ),
    ]


def plant(
    patch: pytest.MonkeyPatch, function: Callable[..., Any], piece: str, instead: str
) -> None:
    """Rewrite one piece of a function in place, also where a hook already holds the function."""
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(piece) == 1, f"{function.__qualname__} has changed: {piece!r} is not in it"
    flags = annotations.compiler_flag
    code = compile(source.replace(piece, instead), "planted", "exec", flags=flags)
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)
    patch.setattr(function, "__code__", namespace[function.__name__].__code__)


def test_every_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    survivors = []
    for name, function, piece, instead in bugs():
        with monkeypatch.context() as patch:
            plant(patch, function, piece, instead)
            if not found_within(200):
                survivors.append(name)
    assert survivors == []


def found_within(examples: int) -> bool:
    """Whether the machine fails; without shrinking, which would only take time."""
    once = settings(
        MACHINE,
        max_examples=examples,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )
    try:
        run_state_machine_as_test(PoolMachine, settings=once)
    except FOUND:
        return True
    return False


def test_the_world_is_small_enough_to_fill() -> None:
    """Calls without a budget overrun the pool, so the machine meets retraction by need too."""
    world = World()
    for i in range(ROWS + 2):
        world.arrive([5, 6, 7, 8 + i], 60, ignore_eos=False)
    for _ in range(400):
        world.step()
        world.check()
    assert world.count["retractions, pool full"] > 0 and len(world.finished) == ROWS + 2
    world.drain()
