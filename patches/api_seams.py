"""Where this package touches how SGLang is configured and how calls come in and are answered.

Installed even where eviction is not possible: calls that ask for it then get 400 and not silence.
"""

from __future__ import annotations

from sgl_skipkv.patches.seam import Seam

_SCHEDULER = "managers.scheduler.Scheduler"
_MANAGER = "managers.tokenizer_manager.TokenizerManager"
_OPENAI = "entrypoints.openai"
_ANTHROPIC = "entrypoints.anthropic"
_OLLAMA = "entrypoints.ollama.serving.OllamaServing"

API_SEAMS: tuple[Seam, ...] = (
    # -- configuration and state
    Seam(
        "server_args.ServerArgs.add_cli_args",
        "after",
        "(parser)",
        "server_args:add_flags",
        "flags on launch_server",
    ),
    Seam(
        "server_args.ServerArgs.from_cli_args",
        "after",
        "(cls, args)",
        "server_args:read_flags",
        "settings travel with ServerArgs",
    ),
    Seam(
        f"{_SCHEDULER}.__init__",
        "after",
        "(self, server_args, port_args)",
        "startup:bind",
        "decide the state on the resolved runtime",
    ),
    Seam(
        f"{_SCHEDULER}.get_init_info",
        "after",
        "(self)",
        "startup:report",
        "the main process learns the state",
    ),
    Seam(
        "entrypoints.engine.Engine._set_startup_time",
        "after",
        "(tokenizer_manager, scheduler_init_result, startup_tic)",
        "tokenizer:open_gate",
        "refuse to start, or open the gate for calls",
    ),
    # -- ways in
    Seam(
        f"{_MANAGER}._create_tokenized_object",
        "before",
        "(self, obj, input_text, input_ids, input_embeds=None, mm_inputs=None, "
        "token_type_ids=None)",
        "tokenizer:move_keys",
        "validate a call's keys and carry them as custom_params",
    ),
    Seam(
        "entrypoints.api_contract.generate_contract_error",
        "around",
        "(body)",
        "http_api:allow_keys",
        "/generate refuses unknown sampling parameters",
    ),
    Seam(
        f"{_OPENAI}.protocol.ChatCompletionRequest",
        "replace",
        "class",
        "openai_api:ChatCompletionRequest",
        "top-level keys of a chat completion",
    ),
    Seam(
        f"{_OPENAI}.protocol.CompletionRequest",
        "replace",
        "class",
        "openai_api:CompletionRequest",
        "top-level keys of a completion",
    ),
    Seam(
        f"{_OPENAI}.protocol.ResponsesRequest",
        "replace",
        "class",
        "openai_api:ResponsesRequest",
        "top-level keys of a response",
    ),
    Seam(
        f"{_OPENAI}.serving_completions.OpenAIServingCompletion._build_sampling_params",
        "after",
        "(self, request)",
        "openai_api:add_completion_keys",
        "completions build their sampling parameters here",
    ),
    Seam(
        f"{_ANTHROPIC}.protocol.AnthropicMessagesRequest",
        "replace",
        "class",
        "anthropic_api:AnthropicMessagesRequest",
        "top-level keys of a message",
    ),
    Seam(
        f"{_ANTHROPIC}.serving.AnthropicServing.handle_messages",
        "around",
        "(self, request, raw_request)",
        "anthropic_api:check_keys",
        "a wrong key of a streamed message would be an error after 200",
    ),
    Seam(
        f"{_ANTHROPIC}.serving.AnthropicServing._convert_to_chat_completion_request",
        "after",
        "(self, anthropic_request)",
        "anthropic_api:carry_keys",
        "messages become chat completions here",
    ),
    Seam(
        f"{_OLLAMA}.handle_chat",
        "around",
        "(self, request, raw_request)",
        "ollama_api:check_keys",
        "a wrong key would be 500, or half an answer",
    ),
    Seam(
        f"{_OLLAMA}.handle_generate",
        "around",
        "(self, request, raw_request)",
        "ollama_api:check_keys",
        "a wrong key would be 500, or half an answer",
    ),
    Seam(
        f"{_OLLAMA}._convert_options_to_sampling_params",
        "after",
        "(self, options=None)",
        "ollama_api:add_option_keys",
        "options that it does not know are dropped",
    ),
    # -- life of a call
    Seam(
        f"{_SCHEDULER}._create_generation_req",
        "after",
        "(self, recv_req, *args, **kwargs)",
        "scheduler:open_call",
        "open a call's state",
    ),
    # -- the way out
    Seam(
        f"{_MANAGER}.update_request_meta_info",
        "after",
        "(self, meta_info, state, customized_info, index, finish_reason)",
        "output:unwrap_meta_info",
        "meta_info['skipkv'] is one object",
    ),
)
