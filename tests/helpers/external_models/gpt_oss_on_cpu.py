"""SGLang's own gpt-oss by another name.

By its own name SGLang refuses it on the backend ``torch_native``, whose stock form has no sinks.
Ours has (``sgl_skipkv/cpu/attention.py``), so everything else of the model runs as it is.
"""

from __future__ import annotations

from sglang.srt.models.gpt_oss import GptOssForCausalLM


class GptOssOnCpuForCausalLM(GptOssForCausalLM):  # type: ignore[misc]  # untyped base
    """Nothing is added."""


EntryClass = GptOssOnCpuForCausalLM
