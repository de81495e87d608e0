"""What SGLang 0.5.22 has in place of two hooks of 0.5.23.

``Scheduler._create_generation_req`` makes a request's ``Req`` in 0.5.23. In 0.5.22
``_handle_generate_request`` does so itself, and calls ``_maybe_namespace_elastic_radix_cache`` with
what it made. For a beam search it calls ``BeamCoordinator.validate_and_init`` before that.

``Scheduler.send_abort_output`` says in 0.5.23 that a request ended while it waited. 0.5.22 sends
such a message as every other one: with ``send_output`` of its channel.

``DataParallelController.get_init_info`` has nothing in its place: 0.5.22 keeps no scheduler's
report. The states of replicas are lost, so the main process refuses every key (``open_gate.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_skipkv.patches.engine.backup import drop_backup
from sgl_skipkv.patches.engine.scheduler import open_request


def remember_received(
    original: Callable[..., None], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> None:
    """AROUND ``Scheduler._handle_generate_request``: ``open_created`` needs what was received."""
    scheduler.skipkv_received = recv_req
    try:
        original(scheduler, recv_req, *args, **kwargs)
    finally:
        scheduler.skipkv_received = None


def open_beam(coordinator: Any, req: Any, recv_req: Any) -> None:
    """BEFORE ``BeamCoordinator.validate_and_init``: as in 0.5.23, keys are looked at before it."""
    open_request(req, coordinator.req_to_token_pool, recv_req)


def open_created(scheduler: Any, req: Any) -> None:
    """BEFORE ``Scheduler._maybe_namespace_elastic_radix_cache``: a request with a budget gets its
    state. A request for an embedding passes here too; it was not received as one that generates."""
    received = getattr(scheduler, "skipkv_received", None)
    if received is not None and req.beam_group is None:
        open_request(req, scheduler, received)


def drop_aborted(sender: Any, output: Any, recv_obj: Any = None) -> None:
    """BEFORE ``SenderWrapper.send_output``: as ``drop_backup``, if a request was aborted."""
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req

    if isinstance(output, AbortReq) and isinstance(recv_obj, Req):
        drop_backup(sender, output, recv_obj)
