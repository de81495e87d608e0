"""Models that a server of the tests finds here: ``SGLANG_EXTERNAL_MODEL_PACKAGE``."""

import torch

# A decode step of hybrid models pins a mask, which asks for the driver of a GPU.
torch.Tensor.pin_memory = lambda tensor, device=None: tensor
