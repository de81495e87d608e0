"""The rings of recent queries, lent to requests for the decode steps in which they record."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_skipkv.eviction.ring_book import RingBook
from sgl_skipkv.recording.recorder import Loan
from sgl_skipkv.request.state import RequestState


class RingLoans:
    """Works out when a request records, and keeps the book of who has which ring then.

    Args:
        rings: how many there are. cycle: the server's interval in decode steps.
    """

    def __init__(self, rings: int, cycle: int) -> None:
        self._book = RingBook(rings, cycle)

    @property
    def free_rings(self) -> int:
        """Rings that nobody has taken for any step."""
        return self._book.free_rings

    def step(self) -> None:
        """A decode step of all running requests is launched."""
        self._book.steps += 1

    def fits(
        self, state: RequestState, tokens: int, before: Sequence[tuple[RequestState, int]] = ()
    ) -> bool:
        """Whether a ring is left for the steps in which the request would record.

        Where not, that changes within an interval of decode steps: the request's steps come later.

        Args:
            tokens: of its prefill.
            before: requests that are admitted before it in this step, with theirs.
        """
        if not state.needs_ring or state.ring or self.free_rings > len(before):
            return True
        earlier = [
            self.recording_steps(other, count)
            for other, count in before
            if other.needs_ring and not other.ring
        ]
        return self._book.fits(self.recording_steps(state, tokens), earlier)

    def take(self, state: RequestState, tokens: int) -> None:
        """The request is admitted with a prefill of so many tokens."""
        state.length_less_steps = tokens - self._book.steps
        if state.settings.evicts:
            state.first_due = state.due_length(tokens)
        if state.needs_ring:
            state.ring_steps = self.recording_steps(state, tokens)
            state.ring = self._book.take(state.ring_steps)

    def give_back(self, state: RequestState) -> None:
        """The request lost its row."""
        if state.ring:
            self._book.give_back(state.ring, state.ring_steps)
            state.ring = 0

    def loan(self, state: RequestState) -> Loan:
        """What the device needs to know of it."""
        policy = state.settings.policy
        if state.ring and not policy.needs_attention:
            params = policy.params
            return Loan(state.ring, state.records_from, params.interval, params.window)
        return Loan(state.ring)

    def check(self, state: RequestState, logical_tokens: int) -> None:
        """Fail the request if it did not advance with the steps that its ring was taken for."""
        ahead = logical_tokens - self._book.steps
        if state.ring and ahead != state.length_less_steps and state.failure is None:
            state.failure = (
                f"it did not advance with every decode step (length less steps {ahead}, at its "
                f"admission {state.length_less_steps}), so its recent queries are not its own"
            )

    def recording_steps(self, state: RequestState, tokens: int) -> int:
        """The decode steps in which the request records, if its prefill of ``tokens`` comes now."""
        policy = state.settings.policy
        if policy.needs_attention:
            return self._book.always
        last = self._book.steps + state.due_length(tokens) - tokens
        return self._book.recording_steps(last, policy.params.interval, policy.params.window)
