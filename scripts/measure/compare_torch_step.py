"""Compares the time of a training step of Medusa heads in jaxspec and in torch, alternating in one process.

    python scripts/measure/compare_torch_step.py [--rows 4] [--tokens 256] [--vocab 49152] [--repeats 7] [--json OUT]

Both train four heads of one block on the same random features in float32, with a shared and frozen projection,
cross-entropy weighted by 0.8^i, clipping and AdamW. The losses of every step must agree. Needs `torch`.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from jaxspec.heads.network import HeadsConfig, init_params
from jaxspec.train import losses
from jaxspec.train.medusa import MedusaTrainee
from jaxspec.train.settings import Settings
from jaxspec.train.step import Trainable, start, train_step


class Head(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(x))


def torch_stepper(features, tokens, table, heads: int, settings: Settings):
    """Returns a function that takes a step in torch and returns its loss."""
    modules = torch.nn.ModuleList(Head(features.shape[-1]) for _ in range(heads))
    adam = torch.optim.AdamW(modules.parameters(), lr=settings.learning_rate, eps=1e-8, weight_decay=0.0)
    features, table = torch.from_numpy(features), torch.from_numpy(table)
    tokens = torch.from_numpy(tokens).long()

    def step() -> float:
        adam.zero_grad()
        total = torch.zeros(())
        for i, head in enumerate(modules):
            logits = head(features[:, : -(2 + i)]) @ table.T
            label = tokens[:, 2 + i :]
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, table.shape[0]), label.reshape(-1))
            total = total + settings.decay**i * loss
        total.backward()
        torch.nn.utils.clip_grad_norm_(modules.parameters(), settings.clip)
        adam.step()
        return float(total.detach())

    return step


def jax_stepper(features, tokens, table, heads: int, settings: Settings):
    """Returns a function that takes a step in jaxspec and returns its loss."""
    trainee = MedusaTrainee(HeadsConfig(features.shape[-1], table.shape[0], heads, 1))
    state = start(settings, trainee, Trainable(init_params(trainee.config)))
    ones = np.ones_like(tokens)
    batch = losses.Batch(*(jnp.asarray(a)[None] for a in (tokens, ones, ones.astype(bool), features)))
    frozen = losses.Frozen(jnp.asarray(table), None, None, None)
    network: Any = None  # only a target that is trained, too, is read in a step
    compiled = jax.jit(lambda frozen, state, batch: train_step(settings, trainee, network, frozen, state, batch))

    def step() -> float:
        nonlocal state
        state, report = compiled(frozen, state, batch)
        return float(report.loss)

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rows", 4), ("tokens", 256), ("width", 576), ("vocab", 49152), ("heads", 4), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    features = rng.normal(size=(args.rows, args.tokens, args.width)).astype(np.float32)
    table = (rng.normal(size=(args.vocab, args.width)) * args.width**-0.5).astype(np.float32)
    tokens = rng.integers(0, args.vocab, (args.rows, args.tokens)).astype(np.int32)
    settings = Settings(warmup=0, steps=10**6, batch=args.rows)
    torch.set_num_threads(torch.get_num_threads())
    steppers = {
        "jaxspec": jax_stepper(features, tokens, table, args.heads, settings),
        "torch": torch_stepper(features, tokens, table, args.heads, settings),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    values: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in range(args.repeats + 1):
        for name, step in steppers.items():
            began = time.perf_counter()
            values[name].append(step())
            if turn:
                seconds[name].append(time.perf_counter() - began)
    apart = max(abs(a - b) / b for a, b in zip(*values.values()))
    positions = args.rows * args.tokens
    print(
        f"jax {jax.__version__}, torch {torch.__version__}, {jax.default_backend()}, {torch.get_num_threads()} threads"
    )
    for name, took in seconds.items():
        median = statistics.median(took)
        print(f"{name}: {median * 1e3:.0f} ms a step ({min(took) * 1e3:.0f} to {max(took) * 1e3:.0f}), "
              f"{positions / median:.0f} tokens/s")  # fmt: skip
    ratio = statistics.median(b / a for a, b in zip(*seconds.values()))
    print(f"torch / jaxspec: {ratio:.2f}; losses differ by {apart:.1e} at most in {args.repeats + 1} steps")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"seconds": seconds, "losses": values, "ratio": ratio}, file)
    return 0 if apart < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
