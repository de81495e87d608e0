"""Held-out problems that no table had while policies were chosen: the next 200 of each level.

python -m bench.reasoner.unseen > .sweep/unseen.jsonl
python -m bench.accuracy --problem-file .sweep/unseen.jsonl --rows unseen_answers \\
    --policies distinct --shares 0.25 --sampling greedy
"""

from __future__ import annotations

import json

from bench.reasoner.export import HELDOUT_PER_LEVEL, heldout_problems


def main() -> None:
    for record in heldout_problems(HELDOUT_PER_LEVEL):
        print(json.dumps(record))


if __name__ == "__main__":
    main()
