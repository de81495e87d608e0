"""Prompts for `skipkv steering extract` on the bundled model: neither trained on nor held out.

python -m bench.reasoner.steering_prompts --problems 100 > prompts.jsonl
"""

from __future__ import annotations

import argparse
import json

from bench.reasoner.problems import make_problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--steps", type=int, default=18, help="relevant facts per problem")
    arguments = parser.parse_args()
    for index in range(arguments.problems):
        print(
            json.dumps(
                {"prompt": make_problem(f"steering/{index}", arguments.steps, amounts=False).prompt}
            )
        )


if __name__ == "__main__":
    main()
