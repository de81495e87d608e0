"""Hybrid models that a server of the tests finds here: ``SGLANG_EXTERNAL_MODEL_PACKAGE``.

Not in ``external_models``: what they replace in torch is in the way of ``torch.compile`` there.
"""

import torch

# A decode step pins a mask, which asks for the driver of a GPU.
torch.Tensor.pin_memory = lambda tensor, device=None: tensor
