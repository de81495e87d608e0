"""What Triton calls the dtypes that the kernels read."""

from __future__ import annotations

import torch

TRITON_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Float dtype -> how Triton's signatures call it."""
KEY_NAMES = {**TRITON_NAMES, torch.float8_e4m3fn: "fp8e4m3", torch.float8_e5m2: "fp8e5m2"}
"""Dtype of cached keys -> what its variants are called. float8 is loaded as bytes."""
