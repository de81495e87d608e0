"""Work on the requests of one step, in parts that fit the workspace, behind the error boundary.

What cannot be done for all requests of a part is tried again for each alone, so that an error ends
the request that it concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from sgl_skipkv.error_boundary import attempt
from sgl_skipkv.eviction.due import Due
from sgl_skipkv.eviction.workspace import split_to_fit

T = TypeVar("T")
Work = Callable[[Sequence[Due]], T]


def in_parts(
    due: Sequence[Due], work: Work[T], work_bytes: int, *, alone: bool = True, **sizes: int
) -> Iterator[T]:
    """``work`` on the requests, part after part, each when it is asked for. Limit and sizes are
    those of ``split_to_fit``.

    Args:
        alone: whether this process may try again what failed. One of several ranks may not:
            ``work`` itself tells the others, and what it raises ends the server.
    """
    for part in split_to_fit([one.row_tokens for one in due], work_bytes, **sizes):
        chosen = [due[i] for i in part]
        yield from retried_alone(chosen, work) if alone else [work(chosen)]


def retried_alone(due: Sequence[Due], work: Work[T]) -> Iterator[T]:
    """``work`` on all requests at once. If that raises, on each alone; a request for which it
    raises again has its ``failure`` set."""
    what = ", ".join(f"kv_budget request {one.state.rid}" for one in due)
    done, error = attempt(what, lambda: [work(due)])
    if done is not None:
        yield from done
    elif len(due) > 1:
        for one in due:
            yield from retried_alone([one], work)
    else:
        due[0].state.failure = error
