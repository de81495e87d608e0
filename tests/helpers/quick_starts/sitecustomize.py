"""Python runs this first in every process that a test starts, so that a server starts quickly.

A server has three processes, and each imports 7,000 modules. Here the first one forks the others,
instead of starting Python anew: a start takes a third of the time. `make demo`, which is a test as
well, starts its server as users do. Garbage is collected rarely, because during imports the
collector looks at all modules again and again.
"""

import gc
import multiprocessing.context
import os

gc.set_threshold(100_000, 50, 100)

if os.environ.get("SGLANG_PLATFORM") == "skipkv_cpu":  # a CUDA device does not survive a fork
    _set_start_method = multiprocessing.context.DefaultContext.set_start_method

    def _fork_instead(self, method, force=False):  # type: ignore[no-untyped-def]
        _set_start_method(self, "fork" if method == "spawn" else method, force)

    multiprocessing.context.DefaultContext.set_start_method = _fork_instead
    multiprocessing.set_start_method = multiprocessing.context._default_context.set_start_method
