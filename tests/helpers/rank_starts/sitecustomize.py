"""Python runs this first in a server whose ranks are looked at: a quick start, and what is planted
there (``rank_plants.py``)."""

import os
import runpy
import sys
from pathlib import Path

_HELPERS = Path(__file__).resolve().parents[1]
runpy.run_path(str(_HELPERS / "quick_starts" / "sitecustomize.py"))
if "sglang.launch_server" in sys.orig_argv:
    sys.path.append(str(_HELPERS))
    import rank_plants

    rank_plants.plant(os.environ["RANK_PLANTS"].split())
