"""KV budgets for SGLang requests.

Importing this package patches nothing. A server loads it through SGLang's plugin entry point. A
client that runs SGLang programs calls ``install()`` or imports ``sgl_skipkv.frontend``.
"""

from __future__ import annotations

__version__ = "0.1.0"


def install() -> None:
    """Let ``sgl.gen`` and a program's ``run`` take the keys: ``kv_budget=``, ``kv_policy=``,
    ``kv_params=``, ``kv_reuse=`` and ``steering=``.
    """
    import sgl_skipkv.frontend

    sgl_skipkv.frontend.install()


__all__ = ["__version__", "install"]
