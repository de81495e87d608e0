"""Train the bundled model from scratch and export it.

    python -m bench.reasoner.train --out examples/reasoner --seed 1
    python -m bench.reasoner.train --out examples/wanderer --start examples/reasoner \\
        --learn "optional checks" --steps 300 --embed-lr 6e-4 --matrix-lr 8e-4
    python -m bench.reasoner.train --out examples/conversant --start examples/reasoner \\
        --learn conversations --steps 600 --embed-lr 1e-3 --matrix-lr 1.5e-3
    python -m bench.reasoner.train --out examples/families --learn families --steps 3600 \\
        --batch-tokens 6144 --decay-share 0.5

Restartable: the state is saved every few minutes, and the same command goes on from it. Uses a
CUDA device when there is one. Needs torch, tokenizers, safetensors, transformers and rich.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.reasoner.batches import IGNORE, Batch, BatchMaker, Kind
from bench.reasoner.classifier import Classifier, FamilyClassifier
from bench.reasoner.copying import start_copying
from bench.reasoner.export import save_model, start_model, write_heldout
from bench.reasoner.families.registry import pieces
from bench.reasoner.model import Reasoner, Shape
from bench.reasoner.vocabulary import build_tokenizer
from sgl_skipkv.cli.progress import progress

LOG_EVERY = 50
SAVE_EVERY_S = 120.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the result: `steps` optimiser steps of `batch_tokens` tokens."""

    seed: int
    steps: int
    batch_tokens: int
    embed_lr: float
    matrix_lr: float
    decay_share: float
    warmup: int = 50

    def rate(self, step: int) -> float:
        """Factor on both learning rates: warm-up, constant, then linear to zero."""
        left = (self.steps - step) / max(1.0, self.steps * self.decay_share)
        return min(1.0, (step + 1) / self.warmup, left)


class Run:
    """A model in training: weights, optimisers, counters."""

    def __init__(self, recipe: Recipe, shape: Shape, device: torch.device, dtype: str) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.device = device
        self.autocast = torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"
        )
        self.model = Reasoner(shape).to(device)
        named = list(self.model.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and not name.startswith("embed")]
        others = [p for name, p in named if p.dim() != 2 or name.startswith("embed")]
        # Muon learned the look-ups and the step order in a tenth of the tokens AdamW needed.
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "matrices": torch.optim.Muon(
                matrices,
                lr=recipe.matrix_lr,
                weight_decay=0.01,
                adjust_lr_fn="match_rms_adamw",
            ),
            "others": torch.optim.AdamW(
                others, lr=recipe.embed_lr, betas=(0.9, 0.98), weight_decay=0.0
            ),
        }
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0

    def update(self, batch: Batch, weight: Tensor) -> tuple[float, Tensor]:
        """One optimiser step, labels weighted by `weight` [B, T].

        Returns the loss and hits bool [B, T], both on the solution.
        """
        with self.autocast:
            logits = self.model(batch.ids, batch.visible)
            losses = F.cross_entropy(
                logits.flatten(0, 1).float(), batch.labels.flatten(), reduction="none"
            )
        # Labels outside the solution have loss 0; the weights' sum must leave them out, too.
        weight = weight * (batch.labels != IGNORE)
        loss = (losses * weight.flatten()).sum() / weight.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rates = {"matrices": self.recipe.matrix_lr, "others": self.recipe.embed_lr}
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = rates[name] * self.recipe.rate(self.step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.ids.numel()
        return loss.item(), logits.argmax(-1) == batch.labels

    def save(self, path: Path) -> None:
        """Write the state in one step, so that an interruption leaves the old one."""
        state = {
            "recipe": asdict(self.recipe),
            "shape": asdict(self.model.shape),
            "model": self.model.state_dict(),
            "optimizers": {name: opt.state_dict() for name, opt in self.optimizers.items()},
            "counters": {"step": self.step, "tokens": self.tokens, "seconds": self.seconds},
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a saved state, which must come from the same recipe."""
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        mine = (asdict(self.recipe), asdict(self.model.shape))
        theirs = (state["recipe"], state["shape"])
        if mine != theirs:
            raise SystemExit(
                f"{path} belongs to another run: expected {mine}, got {theirs}; "
                "give the same options, another --state, or delete it"
            )
        self.model.load_state_dict(state["model"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.step = state["counters"]["step"]
        self.tokens = state["counters"]["tokens"]
        self.seconds = state["counters"]["seconds"]


class Log:
    """`training_log.csv`: loss and accuracy by kind of decision, averaged over LOG_EVERY steps."""

    def __init__(self, path: Path, classifier: Classifier, resume_step: int) -> None:
        self.path = path
        self.classifier = classifier
        self.losses: list[float] = []
        self.hit: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        kept: list[str] = []
        if resume_step and path.exists():
            # Rows written after the saved state will be written again.
            rows = path.read_text().splitlines()[1:]
            kept = [row for row in rows if int(row.split(",")[0]) <= resume_step]
        fields = ("step", "seconds", "tokens", "loss", *classifier.KINDS)
        path.write_text("\n".join([",".join(fields), *kept]) + "\n")

    def add(self, batch: Batch, kinds: Tensor, loss: float, hits: Tensor) -> None:
        """Count one batch."""
        self.losses.append(loss)
        keep = batch.labels != IGNORE
        for index, kind in enumerate(self.classifier.KINDS):
            here = keep & (kinds == index)
            self.hit[kind] += int(hits[here].sum())
            self.seen[kind] += int(here.sum())

    def flush(self, run: Run) -> dict[str, str]:
        """Append a row and start over; returns what to show beside the progress bar."""
        loss = sum(self.losses) / len(self.losses)
        share = {kind: self.hit[kind] / max(1, self.seen[kind]) for kind in self.classifier.KINDS}
        shown = {kind: f"{share[kind]:.4f}" for kind in self.classifier.KINDS}
        row = [run.step, f"{run.seconds:.0f}", run.tokens, f"{loss:.4f}", *shown.values()]
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)
        self.losses, self.hit, self.seen = [], Counter(), Counter()
        return {"loss": f"{loss:.3f}"} | {
            kind: shown[kind][1:5] for kind in ("lookup", "sum") if kind in shown
        }


def train(run: Run, maker: BatchMaker, log: Log, state: Path) -> None:
    """Run to the end of the recipe, saving the state on the way."""
    recipe = run.recipe
    last = saved = time.monotonic()
    with progress() as bar:
        task = bar.add_task("train", total=recipe.steps, completed=run.step)
        while run.step < recipe.steps:
            batch = maker.batch(run.step).to(run.device)
            kinds = log.classifier.kinds(batch)
            log.add(batch, kinds, *run.update(batch, log.classifier.weights[kinds]))
            now = time.monotonic()
            run.seconds += now - last
            last = now
            bar.advance(task)
            if run.step % LOG_EVERY == 0:
                shown = [f"{name} {value}" for name, value in log.flush(run).items()]
                bar.update(task, description=", ".join(shown))
                if now - saved > SAVE_EVERY_S or run.step == recipe.steps:
                    run.save(state)
                    saved = now


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--state", type=Path, help="file of the training state [OUT/state.pt]")
    parser.add_argument("--start", type=Path, help="folder of a trained model to go on from")
    parser.add_argument("--learn", choices=get_args(Kind), default="problems")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2400, help="optimiser steps")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--embed-lr", type=float, default=3e-3)
    parser.add_argument("--matrix-lr", type=float, default=4e-3)
    parser.add_argument(
        "--decay-share", type=float, default=0.35, help="of the steps, with falling rates"
    )
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--feed-forward", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compute",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="arithmetic of the matmuls; the weights are float32 either way. float32 is faster "
        "on a CPU without bfloat16 instructions",
    )
    parser.add_argument("--export-only", action="store_true", help="export the saved state as is")
    return parser.parse_args()


def main() -> None:
    """Train (or go on training), then export the model and the held-out problems."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    state = args.state or args.out / "state.pt"
    families = args.learn == "families"
    tokenizer = build_tokenizer(pieces() if families else ())
    recipe = Recipe(
        args.seed,
        args.steps,
        args.batch_tokens,
        args.embed_lr,
        args.matrix_lr,
        args.decay_share,
    )
    shape = Shape(
        vocab=-(-tokenizer.get_vocab_size() // 16) * 16,
        hidden=args.hidden,
        layers=args.layers,
        feed_forward=args.feed_forward,
    )
    run = Run(recipe, shape, torch.device(args.device), args.compute)
    if state.exists():
        run.load(state)
    elif args.start is not None:
        run.model.load_state_dict(start_model(args.start, shape, tokenizer).state_dict())
    elif families:
        start_copying(run.model)
    if not args.export_only:
        maker = BatchMaker(*(tokenizer, recipe.seed, recipe.batch_tokens, recipe.steps, args.learn))
        classifier = (FamilyClassifier if families else Classifier)(tokenizer).to(run.device)
        log = Log(args.out / "training_log.csv", classifier, run.step)
        train(run, maker, log, state)
    save_model(run.model, args.out, tokenizer)
    if args.learn != "optional checks":  # those are judged by the problems of their start
        write_heldout(args.out / "heldout.jsonl", args.learn)


if __name__ == "__main__":
    main()
