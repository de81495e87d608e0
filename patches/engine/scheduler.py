"""The scheduler: opens requests, bounds their length, ends requests that cannot be resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from sgl_skipkv.config import SettingError, name_of
from sgl_skipkv.error_boundary import attempt
from sgl_skipkv.patches.engine.binding import Binding, binding_of, evicting_state_of, state_of
from sgl_skipkv.patches.engine.new_weights import measure_alone, unmeasured
from sgl_skipkv.patches.engine.waiting import end_stranded, is_stranded
from sgl_skipkv.patches.readiness import Unavailable
from sgl_skipkv.patches.request_kind import OPTED_OUT, request_kind
from sgl_skipkv.request.settings import (
    misspelt_keys,
    refuse_misspelt,
    resolve_request,
    take_keys,
)

logger = logging.getLogger(__name__)


def open_request(req: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler._create_generation_req``: a request with a budget gets its state.

    The tokenizer manager has validated the keys. Requests that bypass it (gRPC) are validated here:
    a wrong key gets 400. The server's defaults are not for SGLang's probes (``/health_generate``).
    """
    from sglang.srt.managers.utils import is_health_check_generate_req

    binding = binding_of(scheduler)
    params = req.sampling_params.custom_params
    rest, keys = take_keys(params) if isinstance(params, dict) else ({}, {})
    if binding is None or not (keys or binding.config.defaults_apply or misspelt_keys(rest)):
        return
    if not keys and is_health_check_generate_req(recv_req):
        return
    opened = partial(_open, req, binding, recv_req, keys, rest)
    _, error = attempt(f"kv_budget request {name_of(req.rid)}", opened)
    refused = error is not None or req.to_finish is not None
    if binding.ranks.any(refused) and not refused:
        error = "another rank could not open it; see the server's log"
        req.skipkv = None
    if error is not None:
        binding.metrics.refused("error")
        req.set_finish_with_abort(
            f"kv_budget request {name_of(req.rid)}: {error}",
            status_code=HTTPStatus.INTERNAL_SERVER_ERROR,
            err_type="InternalServerError",
        )
    if req.to_finish is not None:
        _skip_what_follows(req, recv_req)


def _skip_what_follows(req: Any, recv_req: Any) -> None:
    """SGLang goes on to check what else a refused request asks for, against a prompt of one token,
    and its refusal would replace ours; and to take over images."""
    recv_req.return_logprob, recv_req.logprob_start_len, recv_req.mm_inputs = False, -1, None
    recv_req.return_routed_experts = req.return_sampling_mask = False
    params = recv_req.sampling_params
    params.json_schema = params.regex = params.ebnf = params.structural_tag = None


def _open(
    req: Any, binding: Binding, recv_req: Any, keys: dict[str, Any], rest: dict[str, Any]
) -> None:
    try:
        refuse_misspelt(rest)
        if binding.readiness.reasons:
            field, got = next(iter(keys.items()), ("kv_budget", "the server's default"))
            raise Unavailable(field, got, binding.readiness)
        kind = request_kind(recv_req.session_params, recv_req.sampling_params.beam_width)
        if kind is not None and not keys:
            keys = OPTED_OUT
        settings = resolve_request(keys, binding.config, binding.limits.model_window_tokens)
        if settings is None:
            return
        settings.check_prompt(len(req.origin_input_ids))
        if kind is not None:
            kind.refuse_beside(settings)
        binding.limits.check(settings)
        if binding.runtime is None:
            return  # a prefill server: the decode server evicts
        if settings.evicts and (reason := measure_alone(binding)) is not None:
            binding.metrics.refused("unavailable")
            _refuse_for_now(req, unmeasured(reason))
            return
        req.skipkv = binding.runtime.open(req.rid, settings, req.origin_input_ids)
        if req.skipkv.keeps_prompt_private:
            req.skip_radix_cache_insert = True
    except ValueError as error:
        binding.metrics.refused_for(error)
        req.set_finish_with_abort(str(error), status_code=HTTPStatus.BAD_REQUEST)
    except MemoryError as error:
        binding.metrics.refused("memory")
        message = f"kv_budget: no host memory for copies of KV and recordings: {error}; "
        _refuse_for_now(req, message + "lower retraction_backup_bytes or kv_reuse_bytes (0: none)")


def _refuse_for_now(req: Any, message: str) -> None:
    """End a valid request with 503: the client may retry."""
    req.set_finish_with_abort(
        message, status_code=HTTPStatus.SERVICE_UNAVAILABLE, err_type="ServiceUnavailableError"
    )


def bound_new_tokens(original: Callable[..., None], scheduler: Any, req: Any) -> None:
    """AROUND ``Scheduler.init_req_max_new_tokens``: bound a budgeted request by the context only.

    SGLang also limits ``max_new_tokens`` to the pool size, for the full trace. A budgeted request
    never holds its full trace. One whose prompt leaves no room for its budget may; with speculative
    decoding it ends where drafts have no slots any more, or with the token of its prefill.
    """
    take_changed_prompt(req)
    state, params = evicting_state_of(req), req.sampling_params
    requested, requested_min = params.max_new_tokens, params.min_new_tokens
    original(scheduler, req)
    if state is None or req.to_finish is not None:
        return
    prompt_tokens = len(req.origin_input_ids)
    peak_row_tokens = prompt_tokens + max(
        state.settings.peak_budgeted_tokens() - state.budgeted_tokens(prompt_tokens), 1
    )
    if not state.runtime.fits_pool(peak_row_tokens):
        if state.runtime.reserved_tokens:  # which SGLang's limit does not count
            room = max(state.runtime.most_tokens - prompt_tokens, 1)
            params.max_new_tokens = min(params.max_new_tokens, room)
            params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
        return
    limit = room = context_tokens(scheduler) - prompt_tokens
    for bound in (requested, scheduler.max_new_tokens_limit or None):
        limit = min(limit, bound) if bound is not None else limit
    params.max_new_tokens = max(limit, 0)
    state.reuse.runs_to_context_end = limit == room
    params.min_new_tokens = min(requested_min, params.max_new_tokens)


def take_changed_prompt(req: Any) -> None:
    """Take over a prompt that is not the one of ``open_request``: SGLang puts as many ids as an
    image has tokens in the place of its mark, and cuts a prompt with ``--allow-auto-truncate``."""
    state, ids = state_of(req), req.origin_input_ids
    if state is None or req.to_finish is not None or len(ids) == state.prompt.sent_tokens:
        return
    try:
        state.settings.check_prompt(len(ids))
        state.runtime.take_prompt(state, ids)
    except SettingError as error:
        state.runtime.metrics.refused_for(error)
        req.set_finish_with_abort(str(error), status_code=HTTPStatus.BAD_REQUEST)


def context_tokens(scheduler: Any) -> int:
    """The most tokens of prompt and output together: SGLang's own bound."""
    return int(scheduler.model_config.context_len) - 2


def refuse_unrecomputable(
    original: Callable[..., None], scheduler: Any, req: Any, is_retracted: bool = False
) -> None:
    """AROUND ``Scheduler._add_request_to_queue``: end a retracted request that cannot be resumed.

    It has no backup, and its full trace does not fit the pool, so it would wait for ever.
    """
    if req.is_retracted and is_stranded(req):
        full = req.skipkv.runtime.backs_up
        end_stranded(scheduler, req, "the pool is full" if full else "a pause")
        return
    if not req.is_retracted:
        take_changed_prompt(req)
    original(scheduler, req, is_retracted=is_retracted)
