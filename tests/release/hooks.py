"""Say which hooks hold in the installed SGLang, of whatever version.

    python tests/release/hooks.py            # exit status 1 if a hook does not hold
    python tests/release/hooks.py --record   # the sources have been read: write their hashes

``make canary`` runs it with the interpreter of another environment. A changed body is a warning:
somebody has to read the function. ``--record`` belongs into the commit that read them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings

os.environ.setdefault("SGLANG_PLATFORM", "skipkv_cpu")
warnings.simplefilter("ignore")  # SGLang's, about a machine without a GPU
logging.disable(logging.WARNING)

import sglang

from sgl_skipkv.patches import registry
from sgl_skipkv.patches.startup import hook_bodies


def record() -> int:
    """Write the hashes of this SGLang into the file; versions that are not tested leave it."""
    version = sglang.__version__
    if version not in registry.TESTED_SGLANG:
        tested = ", ".join(registry.TESTED_SGLANG)
        print(f"SGLang {version} is not in TESTED_SGLANG ({tested}): nothing is written")
        return 1
    known = json.loads(hook_bodies.FILE.read_text()) if hook_bodies.FILE.is_file() else {}
    known = {tested: known[tested] for tested in registry.TESTED_SGLANG if tested in known}
    known[version] = hook_bodies.body_hashes(version)
    hook_bodies.FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    print(f"{len(known[version])} hashes of SGLang {version} written to {hook_bodies.FILE}")
    return 0


def tell() -> int:
    """Print what does not hold, what changed, and a count; 1 if a hook does not hold."""
    states, problems = hook_bodies.hook_states()
    by_state = {name: [s for s in states if s.state == name] for name in ("wrong", "changed", "ok")}
    for name, title in (("wrong", "DOES NOT HOLD"), ("changed", "READ AGAIN")):
        for hook, _, text in by_state[name]:
            print(f"{title:14}{hook.target}: {text}")
    counts = {name: len(found) for name, found in by_state.items()}
    print(
        f"SGLang {sglang.__version__}: {counts['ok']} hooks hold and their functions are those "
        f"that were read, {counts['changed']} hold and their functions changed, "
        f"{counts['wrong']} do not hold."
    )
    for problem in problems:
        if not any(problem.startswith(f"hook {s.hook.target} ") for s in by_state["wrong"]):
            print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the hashes of this SGLang")
    sys.exit(record() if parser.parse_args().record else tell())
