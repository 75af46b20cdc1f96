"""Compares the time of a training step in jaxspec and in plain torch, alternating in one process.

    python scripts/measure/compare_torch_step.py [medusa|eagle3] [--rows 4] [--tokens 256] [--vocab 49152]
        [--drafted 49152] [--repeats 7] [--json OUT] [--record ID]

Both train the same heads on the same random features in float32, with a shared and frozen projection, weights of
0.8^i, clipping and AdamW: four Medusa heads of one block with cross-entropy, or an EAGLE-3 head (with the norms of
EAGLE-3.1, and four steps of training-time test) with the KL divergence. The losses of every step must agree. Needs
`torch`.
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

from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.heads import eagle
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import init_params
from jaxspec.models.config import ModelConfig
from jaxspec.train import losses
from jaxspec.train.eagle import EagleTrainee
from jaxspec.train.medusa import MedusaTrainee
from jaxspec.train.medusa_settings import MedusaSettings
from jaxspec.train.settings import TrainSettings
from jaxspec.train.step import Trainable, init_state, train_step
from jaxspec.train.trainee import Trainee

TAPS = (2, 15, 27)


class Head(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(x))


class Eagle(torch.nn.Module):
    """An EAGLE-3.1 head of one layer, which reads its own states in the steps after the first."""

    def __init__(self, config: eagle.EagleConfig, params: dict[str, Any]):
        super().__init__()
        flat = {".".join(str(k.key) for k in path): a for path, a in jax.tree_util.tree_leaves_with_path(params)}
        names = {name: name.replace(".", "_") for name in flat}
        self.config = config.decoder
        for name, a in flat.items():
            self.register_parameter(names[name], torch.nn.Parameter(torch.from_numpy(np.array(a))))

    def rms(self, x, scale):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], scale, self.config.norm_eps)

    def turn(self, x, positions):
        angles = positions[:, None] * torch.from_numpy(np.array(self.config.rope.frequencies(x.shape[-1])))
        cos, sin, (low, high) = torch.cos(angles), torch.sin(angles), x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def forward(self, taps, embed, tokens, table, steps: int):
        """Returns the logits of each step."""
        c, (batch, size) = self.config, tokens.shape
        groups = c.num_heads // c.num_kv_heads
        each = taps.chunk(len(TAPS), -1)
        states = torch.cat([self.rms(a, getattr(self, f"fc_norms_{i}")) for i, a in enumerate(each)], -1) @ self.fc
        sees, kept, logits = torch.ones(size, size, dtype=torch.bool).tril(), [], []
        for step in range(steps):
            ahead = torch.nn.functional.pad(tokens[:, 1 + step :], (0, 1 + step))
            words = self.rms(embed[ahead], self.layers_0_attn_norm)
            read = torch.cat([words, self.rms(states, self.hidden_norm)], -1)
            heads = (read @ self.layers_0_qkv).view(batch, size, -1, c.head_dim).transpose(1, 2)
            queries, keys, values = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
            positions = torch.arange(size) + step
            queries, keys = self.turn(queries, positions), self.turn(keys, positions)
            kept.append((keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)))
            scores = [(queries @ kept[0][0].transpose(-1, -2)).masked_fill(~sees, float("-inf"))]
            scores += [(queries * k).sum(-1, keepdim=True) for k, _ in kept[1:]]
            weights = (torch.cat(scores, -1) * c.head_dim**-0.5).softmax(-1)
            mixed = weights[..., :size] @ kept[0][1]
            mixed = mixed + sum(weights[..., size + i, None] * v for i, (_, v) in enumerate(kept[1:]))
            x = states + mixed.transpose(1, 2).reshape(batch, size, -1) @ self.layers_0_out
            gate, up = (self.rms(x, self.layers_0_mlp_norm) @ self.layers_0_gate_up).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up) @ self.layers_0_down
            states = self.rms(x, self.norm)
            logits.append(states @ table.T)
        return logits


def torch_medusa(features, tokens, table, drafted: int, trainee: MedusaTrainee, params: Any):
    """Returns the parameters in torch, and a function that returns the losses of the heads."""
    modules = torch.nn.ModuleList(Head(features.shape[-1]) for _ in range(trainee.drafted))
    labels, table = torch.from_numpy(tokens).long(), torch.from_numpy(table)
    features = torch.from_numpy(features)

    def compute():
        for i, head in enumerate(modules):
            logits = (head(features[:, : -(2 + i)]) @ table.T).reshape(-1, table.shape[0])
            yield torch.nn.functional.cross_entropy(logits, labels[:, 2 + i :].reshape(-1))

    return list(modules.parameters()), compute


def torch_eagle(features, tokens, table, drafted: int, trainee: EagleTrainee, params: Any):
    """Returns the parameters in torch, and a function that returns the losses of the steps."""
    head, width = Eagle(trainee.config, params), trainee.config.hidden_size
    embed, labels, features = torch.from_numpy(table), torch.from_numpy(tokens).long(), torch.from_numpy(features)
    law = (features[..., :width] @ embed[:drafted].T).log_softmax(-1)

    def compute():
        for i, logits in enumerate(head(features[..., width:], embed, labels, embed[:drafted], trainee.drafted)):
            known, guess = law[:, 1 + i : -1], logits[:, : -(2 + i)].log_softmax(-1)
            yield (known.exp() * (known - guess)).sum(-1).mean()

    return list(head.parameters()), compute


def torch_stepper(parameters: list, compute: Any, settings: TrainSettings):
    """Returns a function that takes a step in torch and returns its loss."""
    adam = torch.optim.AdamW(parameters, lr=settings.learning_rate, eps=1e-8, weight_decay=0.0)

    def step() -> float:
        adam.zero_grad()
        total = torch.zeros(())
        for i, loss in enumerate(compute()):
            total = total + settings.decay**i * loss
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        adam.step()
        return float(total.detach())

    return step


def jax_stepper(features, tokens, table, drafted: int, trainee: Trainee, params: Any, settings: TrainSettings):
    """Returns a function that takes a step in jaxspec and returns its loss."""
    state = init_state(settings, trainee, Trainable(params))
    ones = np.ones_like(tokens)
    batch = losses.Batch(*(jnp.asarray(a)[None] for a in (tokens, ones, ones.astype(bool), features)))
    index = jnp.arange(len(table))
    index = None if drafted == len(table) else jnp.where(index < drafted, index, -1)
    frozen = losses.FrozenTarget(jnp.asarray(table[:drafted]), None, jnp.asarray(table), index)
    network: Any = None  # only a target that is trained, too, is read in a step
    compiled = jax.jit(lambda frozen, state, batch: train_step(settings, trainee, network, frozen, state, batch))

    def step() -> float:
        nonlocal state
        state, report = compiled(frozen, state, batch)
        return float(report.loss)

    return step


def make_steppers(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the steps of both, by name."""
    rng, eagle3 = np.random.default_rng(0), args.kind == "eagle3"
    features = rng.normal(size=(args.rows, args.tokens, args.width * (1 + len(TAPS) * eagle3))).astype(np.float32)
    table = (rng.normal(size=(args.vocab, args.width)) * args.width**-0.5).astype(np.float32)
    tokens = rng.integers(0, args.drafted, (args.rows, args.tokens)).astype(np.int32)
    loss = "kl" if eagle3 else "ce"
    settings = MedusaSettings(warmup=0, steps=10**6, batch=args.rows, loss=loss, learning_rate=1e-3)
    if eagle3:  # sizes of SmolLM2-135M's layers
        decoder = ModelConfig(args.vocab, args.width, args.width * 8 // 3, 1, args.width // 64, args.width // 192, 64)
        config = eagle.EagleConfig(decoder, taps=TAPS, fc_norm=True, norm_output=True)
        trainee, params = EagleTrainee.of(config, args.heads), init_params(config, key=jax.random.key(0))
        parameters = torch_eagle(features, tokens, table, args.drafted, trainee, params)
    else:
        trainee = MedusaTrainee.of(HeadsConfig(args.width, args.vocab, args.heads, 1))
        params = init_params(trainee.config)
        parameters = torch_medusa(features, tokens, table, args.drafted, trainee, params)
    return {
        "jaxspec": jax_stepper(features, tokens, table, args.drafted, trainee, params, settings),
        "torch": torch_stepper(*parameters, settings),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=("medusa", "eagle3"), default="medusa")
    sizes = {"rows": 4, "tokens": 256, "width": 576, "vocab": 49152, "drafted": 49152, "heads": 4, "repeats": 7}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json")
    add_record(parser.add_argument)
    args = parser.parse_args()
    steppers = make_steppers(args)
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
    for name, each in seconds.items():
        median = statistics.median(each)
        print(f"{name}: {median * 1e3:.0f} ms a step ({min(each) * 1e3:.0f} to {max(each) * 1e3:.0f}), "
              f"{positions / median:.0f} tokens/s")  # fmt: skip
    ratio = statistics.median(b / a for a, b in zip(*seconds.values()))
    print(f"torch / jaxspec: {ratio:.2f}; losses differ by {apart:.1e} at most in {args.repeats + 1} steps")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"seconds": seconds, "losses": values, "ratio": ratio}, file)
    if args.record:
        took = {name: round_significant(statistics.median(each) * 1e3) for name, each in seconds.items()}
        found = {"kind": args.kind, "ms": took, "ratio": round_significant(ratio), "losses_apart": apart}
        found |= {name: getattr(args, name) for name in sizes}
        print(f"written: {write_record(args.record, 'torch-step', sys.argv, found, {'torch': torch.__version__})}")
    return 0 if apart < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
