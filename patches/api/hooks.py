"""Hooks into SGLang's APIs and its output.

They are also installed where eviction is not supported, so that a request with a budget gets 400.
"""

from __future__ import annotations

from sgl_skipkv.patches.hook import Hook

_SCHEDULER = "managers.scheduler.Scheduler"
_MANAGER = "managers.tokenizer_manager.TokenizerManager"
_OPENAI = "entrypoints.openai"
_ANTHROPIC = "entrypoints.anthropic"
_OLLAMA = "entrypoints.ollama.serving.OllamaServing"

API_HOOKS: tuple[Hook, ...] = (
    # -- APIs
    Hook(
        f"{_MANAGER}._create_tokenized_object",
        "before",
        "(self, obj, input_text, input_ids, input_embeds=None, mm_inputs=None, "
        "token_type_ids=None)",
        "api.tokenizer:move_keys",
        "validate a request's keys and carry them as custom_params",
    ),
    Hook(
        "entrypoints.api_contract.generate_contract_error",
        "around",
        "(body)",
        "api.generate:allow_keys",
        "/generate refuses unknown sampling parameters",
    ),
    Hook(
        f"{_OPENAI}.protocol.ChatCompletionRequest",
        "replace",
        "class",
        "api.openai:ChatCompletionRequest",
        "top-level keys of a chat completion",
    ),
    Hook(
        f"{_OPENAI}.protocol.CompletionRequest",
        "replace",
        "class",
        "api.openai:CompletionRequest",
        "top-level keys of a completion",
    ),
    Hook(
        f"{_OPENAI}.protocol.ResponsesRequest",
        "replace",
        "class",
        "api.openai:ResponsesRequest",
        "top-level keys of a response",
    ),
    Hook(
        f"{_OPENAI}.serving_completions.OpenAIServingCompletion._build_sampling_params",
        "after",
        "(self, request)",
        "api.openai:add_completion_keys",
        "completions build their sampling parameters here",
    ),
    Hook(
        f"{_ANTHROPIC}.protocol.AnthropicMessagesRequest",
        "replace",
        "class",
        "api.anthropic:AnthropicMessagesRequest",
        "top-level keys of a message",
    ),
    Hook(
        f"{_ANTHROPIC}.serving.AnthropicServing.handle_messages",
        "around",
        "(self, request, raw_request)",
        "api.anthropic:check_keys",
        "a wrong key of a streamed message would fail after status 200",
    ),
    Hook(
        f"{_ANTHROPIC}.serving.AnthropicServing._convert_to_chat_completion_request",
        "after",
        "(self, anthropic_request)",
        "api.anthropic:carry_keys",
        "messages become chat completions here",
    ),
    Hook(
        f"{_OLLAMA}.handle_chat",
        "around",
        "(self, request, raw_request)",
        "api.ollama:check_keys",
        "a wrong key would get 500, or a stream that breaks off",
    ),
    Hook(
        f"{_OLLAMA}.handle_generate",
        "around",
        "(self, request, raw_request)",
        "api.ollama:check_keys",
        "a wrong key would get 500, or a stream that breaks off",
    ),
    Hook(
        f"{_OLLAMA}._convert_options_to_sampling_params",
        "after",
        "(self, options=None)",
        "api.ollama:add_option_keys",
        "SGLang drops unknown options here",
    ),
    # -- life of a request
    Hook(
        f"{_SCHEDULER}._create_generation_req",
        "after",
        "(self, recv_req, *args, **kwargs)",
        "engine.scheduler:open_request",
        "open a request's state",
    ),
    # -- output
    Hook(
        f"{_MANAGER}.update_request_meta_info",
        "after",
        "(self, meta_info, state, customized_info, index, finish_reason)",
        "api.meta_info:unwrap_meta_info",
        "meta_info['skipkv'] is one object",
    ),
)
