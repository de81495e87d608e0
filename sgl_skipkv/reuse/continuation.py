"""A request continues a history, and leaves one.

With ``kv_reuse: "keep"`` the history is part of the prompt: it stays as it is, and the budget is
for what the request generates. With ``"budget"`` the request goes on where the earlier one ended:
its protected prompt is the first prompt of the conversation, and everything behind it counts as
generated, the new text included.

A sentence ends with its turn: what a request adds begins a new one.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from sgl_skipkv.offload.host_memory import HostCopy
from sgl_skipkv.recording.sentences import SentenceTracker
from sgl_skipkv.request.pages import page_ceil, page_floor
from sgl_skipkv.request.parts import Continued, FirstPrompt, KVState, SentenceState
from sgl_skipkv.request.state import RequestState
from sgl_skipkv.reuse.histories import HistoryMatch, common_tokens
from sgl_skipkv.reuse.history import History, Recordings, private_keys
from sgl_skipkv.reuse.thoughts import Thought


class FinishedRow(NamedTuple):
    """What is in a finished request's row.

    Attributes:
        prompt: that it came with.
        tokens: all that are or were in the row.
        key: of the row so far, in the radix tree: token ids behind those of its own history.
        thought: what was dropped from its output; None: nothing.
    """

    prompt: array[int]
    tokens: array[int]
    key: array[int]
    thought: Thought | None = None


def namespace_of(state: RequestState, *of_cache: Hashable) -> Hashable:
    """Requests with the same namespace may continue each other's histories.

    Args:
        of_cache: what separates requests in the radix tree.
    """
    settings, policy = state.settings, state.settings.policy
    # Recordings are of one policy with one set of parameters.
    counted = (policy.name, policy.params) if settings.kv_reuse == "budget" else ()
    return (settings.kv_reuse, settings.steering, *counted, *of_cache)


def continue_history(
    state: RequestState, found: HistoryMatch, tracker: SentenceTracker, max_new_tokens: int
) -> None:
    """Set the state of a request without a row, and a tracker without sentences, to the end of the
    history."""
    (history, cut), boundary_tokens = found, state.runtime.boundary_tokens
    # Its last key names a token behind it, which may be another one here: that is computed again.
    row_tokens = cut - boundary_tokens - history.evicted_tokens
    recordings, page_tokens = history.recordings, state.runtime.page_tokens
    pages = history.key + history.padding
    continued = state.reuse.continued = Continued(
        history.rid,
        history.key[:row_tokens],
        pages[row_tokens : page_ceil(row_tokens, page_tokens)],
        history.tokens,
        cut - boundary_tokens,
        unsent_tokens=history.unsent_tokens,
        recorded_tokens=0 if recordings is None else recordings.recorded_tokens,
        shared_tokens=page_floor(row_tokens, page_tokens),
    )
    prompt = state.prompt
    prompt.tokens = prompt.uncounted_tokens = prompt.sent_tokens + history.unsent_tokens
    state.kv = KVState(
        followed_tokens=state.kv.followed_tokens + history.unsent_tokens,
        evicted_tokens=history.evicted_tokens,
        last=history.last,
        last_is_read=True,
    )
    if recordings is None:
        return
    prompt.uncounted_tokens = history.prompt_tokens
    prompt.earlier_compactions = recordings.compactions
    state.kv.statistics, state.kv.recorded_tokens = dict(recordings.statistics), cut
    generated = cut - history.prompt_tokens
    tracker.resume([span for span in recordings.closed if span[1] <= generated], generated)
    closed, known = len(tracker.closed), recordings.redundancy
    state.sentences = SentenceState(
        tracker,
        live=[sentence for sentence in recordings.live if sentence < closed],
        table=[sentence for sentence in recordings.table if sentence < closed],
        table_closed=closed,
        redundancy=None if known is None else known.up_to(closed),
    )
    earlier = _spans_before(cut, recordings.input_spans)
    state.reuse.input_spans = [*earlier, (cut, prompt.tokens)]
    continued.recorded = recordings.recorded
    # Who may evict needs slots of its own: the tree's may be read by other branches. Only decode
    # steps evict, and the first generated token comes from the prefill.
    last_row_tokens = prompt.tokens - history.evicted_tokens + max_new_tokens
    continued.copies = max_new_tokens > 1 and state.may_be_due_until(last_row_tokens)
    if continued.copies:
        first_tokens = prompt.uncounted_tokens - boundary_tokens
        continued.shared_tokens = page_floor(first_tokens, page_tokens)


def first_prompt_of(found: HistoryMatch, prompt: array[int]) -> FirstPrompt | None:
    """What a history says about a prompt that cannot continue it; None with ``kv_reuse: "keep"``,
    where all of the prompt stays.

    Without it the whole conversation would stay for good, as the prompt of a request that begins
    one.
    """
    history, cut = found
    if (known := history.recordings) is None:
        return None
    if history.unsent_tokens:  # the prompt has other positions
        first = common_tokens(history.tokens[: history.prompt_tokens], prompt)
        return FirstPrompt(first, known.compactions, [(first, len(prompt))])
    spans = [*_spans_before(cut, known.input_spans), (cut, len(prompt))]
    return FirstPrompt(history.prompt_tokens, known.compactions, spans)


def count_conversation(state: RequestState) -> None:
    """What is behind the conversation's first prompt counts as generated, though the request
    computes it with its prompt."""
    first, prompt = state.reuse.first_prompt, state.prompt
    if first is not None:
        prompt.uncounted_tokens, prompt.earlier_compactions, state.reuse.input_spans = first


def _spans_before(cut: int, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(start, min(stop, cut)) for start, stop in spans if start < cut]


def history_of(
    state: RequestState,
    namespace: Hashable,
    finished: FinishedRow,
    recorded: Mapping[str, HostCopy] | None,
    *,
    table_capacity: int,
) -> History:
    """What a finished request leaves. Its last compaction is read back, its sentences are fed.

    Nothing in it shares memory with what other requests have, which would outlive them.
    """
    continued, key = state.reuse.continued, finished.key
    has_evicted = state.kv.evicted_tokens > (0 if continued is None else continued.evicted_tokens)
    if has_evicted or state.settings.steers:
        key = _private_key(state, finished)
    recordings, redundancy = None, state.sentences.redundancy
    if state.settings.kv_reuse == "budget":
        recordings = Recordings(
            closed=tuple(state.sentences.tracker.closed),
            input_spans=tuple(state.reuse.input_spans),
            live=tuple(state.sentences.live),
            table=tuple(state.sentences.entries(table_capacity)),
            redundancy=None if redundancy is None else redundancy.with_own_memory(),
            recorded=recorded,
            recorded_tokens=max(
                len(finished.tokens), 0 if continued is None else continued.recorded_tokens
            ),
            statistics={name: one.clone() for name, one in state.kv.statistics.items()},
            followed_tokens=state.kv.followed_tokens if state.kv.statistics else 0,
            # What is dropped follows no score, so the budget of a later compaction ignores it.
            compactions=state.compactions - (finished.thought is not None),
        )
    return History(
        state.rid,
        namespace,
        finished.tokens,
        sent_tokens(state, finished),
        key,
        own_prompt_tokens=state.prompt.sent_tokens,
        edge_tokens=0 if finished.thought is None else finished.thought.edge_tokens,
        prompt_tokens=state.prompt.uncounted_tokens,
        last=None if state.kv.last is None else state.kv.last.with_own_memory(),
        recordings=recordings,
        padding=private_keys(page_ceil(len(key), state.runtime.page_tokens) - len(key)),
        boundary_tokens=state.runtime.boundary_tokens,
    )


def _private_key(state: RequestState, finished: FinishedRow) -> array[int]:
    """Of a row of which others can have the beginning only. In a tree whose keys name the next
    token, too, whoever continues the row computes its last token again, and SGLang takes the key
    of that token for its id. So tokens are named by their ids that have seen nothing of what was
    evicted, and the last one in any case: its own entry is never filed."""
    row_tokens, shared, last = len(finished.key), state.shared_row_tokens, state.kv.last
    by_id = 0
    if state.runtime.boundary_tokens and last is not None:
        seen_tokens = last.logical_tokens + last.running_tokens
        by_id = max(len(finished.tokens) - seen_tokens, 1)
        if by_id >= row_tokens - shared:
            by_id = 0  # others would find what follows; nobody can continue it
    behind = finished.tokens[len(finished.tokens) - by_id :]
    return finished.key[:shared] + private_keys(row_tokens - shared - by_id) + behind


def sent_tokens(state: RequestState, finished: FinishedRow) -> array[int]:
    """Prompt and output as the next prompt has them."""
    thought_tokens, opener_tokens, _ = finished.thought or (0, 0, 0)
    if not state.unsent_tokens + thought_tokens:
        return finished.tokens
    prompt = finished.prompt[: len(finished.prompt) - opener_tokens]
    return prompt + finished.tokens[state.prompt.tokens + thought_tokens :]
