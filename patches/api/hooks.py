"""Hooks into SGLang's APIs and its output.

They are also installed where eviction is not supported, so that a request with a budget gets 400.
"""

from __future__ import annotations

from sgl_skipkv.patches.hook import Hook, after, around, before, replace, uses

API_HOOKS: tuple[Hook, ...] = (
    # -- APIs
    before(
        "managers.tokenizer_manager.TokenizerManager._create_tokenized_object(self, obj, "
        "input_text, input_ids, input_embeds=None, mm_inputs=None, token_type_ids=None)",
        "api.tokenizer:move_keys",
        "validate a request's keys and carry them as custom_params",
    ),
    around(
        "entrypoints.api_contract.generate_contract_error(body)",
        "api.generate:allow_keys",
        "/generate refuses unknown sampling parameters",
    ),
    *(
        replace(f"entrypoints.openai.protocol.{name}", f"api.openai:{name}", "our top-level keys")
        for name in ("ChatCompletionRequest", "CompletionRequest", "ResponsesRequest")
    ),
    after(
        "entrypoints.openai.serving_completions.OpenAIServingCompletion._build_sampling_params("
        "self, request)",
        "api.openai:add_completion_keys",
        "completions build their sampling parameters here",
    ),
    around(
        "entrypoints.openai.serving_responses.OpenAIServingResponses.create_responses(self, "
        "request, raw_request=None)",
        "api.openai:check_response_keys",
        "a wrong key of a streamed response would fail after status 200",
    ),
    replace(
        "entrypoints.anthropic.protocol.AnthropicMessagesRequest",
        "api.anthropic:AnthropicMessagesRequest",
        "our top-level keys",
    ),
    around(
        "entrypoints.anthropic.serving.AnthropicServing.handle_messages(self, request, "
        "raw_request)",
        "api.anthropic:check_keys",
        "a wrong key of a streamed message would fail after status 200",
    ),
    after(
        "entrypoints.anthropic.serving.AnthropicServing._convert_to_chat_completion_request("
        "self, anthropic_request)",
        "api.anthropic:carry_keys",
        "messages become chat completions here",
    ),
    *(
        around(
            f"entrypoints.ollama.serving.OllamaServing.{name}(self, request, raw_request)",
            "api.ollama:check_keys",
            "a wrong key would get 500, or a stream that breaks off",
        )
        for name in ("handle_chat", "handle_generate")
    ),
    after(
        "entrypoints.ollama.serving.OllamaServing._convert_options_to_sampling_params(self, "
        "options=None)",
        "api.ollama:add_option_keys",
        "SGLang drops unknown options here",
    ),
    uses(
        "utils.auth.auth_level(level)",
        "api.explorer:add_explorer",
        "the explorer's routes ask for the key of an administrator, where one is set",
    ),
    # -- life of a request
    after(
        "managers.scheduler.Scheduler._create_generation_req(self, recv_req, *args, **kwargs)",
        "engine.scheduler:open_request",
        "open a request's state",
        "0.5.23",
    ),
    around(
        "managers.scheduler.Scheduler._handle_generate_request(self, recv_req, mm_cleanup, *, "
        "mm_input_error=None)",
        "engine.sglang_0_5_22:remember_received",
        "know which message a request is made from",
        "0.5.22",
    ),
    before(
        "beam_search.coordinator.BeamCoordinator.validate_and_init(self, req, recv_req)",
        "engine.sglang_0_5_22:open_beam",
        "refuse a budget before beam search gives the request other parameters",
        "0.5.22",
    ),
    before(
        "managers.scheduler.Scheduler._maybe_namespace_elastic_radix_cache(self, req)",
        "engine.sglang_0_5_22:open_created",
        "open a request's state",
        "0.5.22",
    ),
    # -- output
    after(
        "managers.tokenizer_manager.TokenizerManager.update_request_meta_info(self, meta_info, "
        "state, customized_info, index, finish_reason)",
        "api.meta_info:unwrap_meta_info",
        "meta_info['skipkv'] is one object",
    ),
    around(
        "managers.tokenizer_manager.TokenizerManager._handle_abort_req(self, recv_obj)",
        "api.meta_info:report_aborted",
        "a request that ends while it waits reports meta_info['skipkv'] too",
    ),
)
