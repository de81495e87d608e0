"""The tokenizer of the served model, also where SGLang loads none (``--skip-tokenizer-init``).

Frameworks for reinforcement learning send and read token ids, and leave the tokenizer out. The
plugin needs its vocabulary: for the ends of sentences, for thoughts, and for the text that measures
the model. So a scheduler then loads what SGLang would have loaded. SGLang's own attribute stays
``None``: what SGLang refuses without a tokenizer, it still refuses.
"""

from __future__ import annotations

from typing import Any

from sgl_skipkv.error_boundary import attempt


def tokenizer_of(scheduler: Any) -> Any:
    """SGLang's, or else our own; None where ``missing_vocabulary`` says why."""
    return _loaded(scheduler)[0] if scheduler.tokenizer is None else scheduler.tokenizer


def missing_vocabulary(scheduler: Any) -> str | None:
    """Why there is no vocabulary; None: there is one."""
    tokenizer, why = scheduler.tokenizer, None
    if tokenizer is None:
        tokenizer, why = _loaded(scheduler)
    if why is not None:
        return f"--skip-tokenizer-init, and no tokenizer could be loaded: {why}"
    kind = type(tokenizer).__name__  # SGLang's own class of tiktoken files
    return None if hasattr(tokenizer, "get_vocab") else f"{kind} without get_vocab"


def _loaded(scheduler: Any) -> tuple[Any, str | None]:
    """Our own tokenizer, loaded once, or (None, why not)."""
    if not hasattr(scheduler, "skipkv_tokenizer"):
        # A model's own code may raise anything, also where eviction is not enabled.
        loaded, failure = attempt("sgl_skipkv: the tokenizer", _load)
        scheduler.skipkv_tokenizer = (None, failure) if loaded is None else loaded
    loaded_before: tuple[Any, str | None] = scheduler.skipkv_tokenizer
    return loaded_before


def _load() -> tuple[Any, str | None]:
    from sglang.srt.runtime_context import get_model, get_serving
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    serving, model = get_serving(), get_model()
    try:
        tokenizer = get_tokenizer(
            serving.tokenizer_path,
            tokenizer_mode=serving.tokenizer_mode,
            trust_remote_code=model.trust_remote_code,
            revision=model.revision,
            tokenizer_backend=serving.tokenizer_backend,
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        return None, f"{serving.tokenizer_path}: {reason or type(error).__name__}"
    return tokenizer, None
