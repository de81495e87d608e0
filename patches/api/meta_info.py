"""``meta_info["skipkv"]`` in the main process: the streamed list becomes one object, and a request
that ended while it waited gets its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sgl_skipkv.request.summary import META_KEY


def unwrap_meta_info(
    result: None, manager: Any, meta_info: dict[str, Any], state: Any, *args: Any, **kwargs: Any
) -> None:
    """AFTER ``TokenizerManager.update_request_meta_info``: a list of one becomes the object.

    A request without a budget that shares a chunk with a budgeted one has an empty list: no object.
    """
    if META_KEY not in meta_info:
        return
    del meta_info[META_KEY]
    if hasattr(state, "customized_info_reported_keys"):
        state.customized_info_reported_keys.discard(META_KEY)
    # SGLang 0.5.22 has no such set: it reports what is accumulated.
    values = state.customized_info_accumulated.pop(META_KEY)
    if values:
        meta_info[META_KEY] = values[-1]


def report_aborted(original: Callable[..., None], manager: Any, recv_obj: Any) -> None:
    """AROUND ``TokenizerManager._handle_abort_req``: the summary of ``engine.output.send_summary``
    becomes an object of the answer."""
    summary = (recv_obj.finished_reason or {}).pop(META_KEY, None)
    state = manager.rid_to_state.get(recv_obj.rid)
    original(manager, recv_obj)
    # SGLang leaves a health probe without an answer.
    if summary is not None and state is not None and state.out_list:
        state.out_list[-1]["meta_info"][META_KEY] = json.loads(summary)
