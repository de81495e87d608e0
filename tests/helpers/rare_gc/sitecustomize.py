"""Python runs this first in every process that a test starts: garbage is collected rarely.

A server imports 7,000 modules in each of its three processes, and about a quarter of that time is
the garbage collector, which looks at all of them again and again.
"""

import gc

gc.set_threshold(100_000, 50, 100)
