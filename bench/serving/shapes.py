"""A folder that a server loads as a 7B model, without its weights: enough to measure times.

    python -m bench.serving.shapes FOLDER --size r1-qwen-7b
    python -m bench.serving --model-path FOLDER --server-flags load-format=dummy

The config is of the sizes that ``bench.decode`` knows, the tokenizer the bundled model's. It knows
few of the model's tokens, so a server must not be asked for text.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from bench.decode.model import SIZES
from bench.lib.serving import BUNDLED

CONTEXT_TOKENS = 32_768


def write(folder: Path, size_name: str) -> None:
    """Config and tokenizer of this size, in a new folder."""
    size = SIZES[size_name]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": size.hidden_size,
        "intermediate_size": size.mlp_size,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads.query,
        "num_key_value_heads": size.heads.kv,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="r1-qwen-7b")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.size)


if __name__ == "__main__":
    main()
