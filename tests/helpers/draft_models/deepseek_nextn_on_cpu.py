"""SGLang's own layer of DeepSeek for several tokens at once, without a GPU to wait for."""

from __future__ import annotations

from sglang.srt.models import deepseek_nextn
from torch import Tensor


class DeepseekV3ForCausalLMNextN(deepseek_nextn.DeepseekV3ForCausalLMNextN):  # type: ignore[misc]
    """By the same name, which SGLang takes for MLA."""

    def set_embed_and_head(self, embed: Tensor, head: Tensor) -> None:
        self.model.embed_tokens.weight, self.lm_head.weight = embed, head


EntryClass = DeepseekV3ForCausalLMNextN
