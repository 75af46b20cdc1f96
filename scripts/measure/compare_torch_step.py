"""Compares the time of a training step in jaxspec and in plain torch, alternating in one process.

    python scripts/measure/compare_torch_step.py [medusa|eagle3|jetspec] [--rows 4] [--tokens 256] [--vocab 49152]
        [--drafted 49152] [--heads 4] [--repeats 7] [--json OUT] [--record ID]

Both train the same heads on the same random features in float32, with a shared and frozen projection, clipping and
AdamW: four Medusa heads of one block with cross-entropy, an EAGLE-3 head (with the norms of EAGLE-3.1, and four steps
of training-time test) with the KL divergence, or a JetSpec head of three layers with the KL divergence, which guesses
four tokens from each of 64 positions of a row. The tokens of Medusa and EAGLE-3 have the weights 0.8^i. torch
computes the target's distributions once, before the steps; jaxspec computes them in every step. The losses of every
step must agree. Needs `torch`.
"""

import argparse
import json
import math
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
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import init_params
from jaxspec.models.config import ModelConfig
from jaxspec.train import losses
from jaxspec.train.batch import draw_anchors
from jaxspec.train.dflash import DFlashTrainee
from jaxspec.train.eagle import EagleTrainee
from jaxspec.train.medusa import MedusaTrainee
from jaxspec.train.medusa_settings import MedusaSettings
from jaxspec.train.settings import TrainSettings
from jaxspec.train.step import Trainable, init_state, train_step
from jaxspec.train.trainee import BlockTraining, Trainee

TAPS = (2, 15, 27)
BLOCKS = 64
"""The number of positions of a row that a JetSpec head guesses from."""


class Head(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(x))


class Layers(torch.nn.Module):
    """The parameters of a head with decoder layers, named as in jaxspec, and what its layers share."""

    def __init__(self, config: Any, params: dict[str, Any]):
        super().__init__()
        self.sizes, self.config = config, config.decoder
        for path, a in jax.tree_util.tree_leaves_with_path(params):
            name = "_".join(str(k.key) for k in path).replace(".", "_")
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(np.array(a))))

    def rms(self, x, scale):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], scale, self.config.norm_eps)

    def turn(self, x, positions):
        angles = positions[..., None] * torch.from_numpy(np.array(self.config.rope.frequencies(x.shape[-1])))
        cos, sin, (low, high) = torch.cos(angles), torch.sin(angles), x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def mlp(self, x, layer: int):
        gate, up = (self.rms(x, self.of(layer, "mlp_norm")) @ self.of(layer, "gate_up")).chunk(2, -1)
        return x + (torch.nn.functional.silu(gate) * up) @ self.of(layer, "down")

    def of(self, layer: int, name: str):
        return getattr(self, f"layers_{layer}_{name}")


class Eagle(Layers):
    """An EAGLE-3.1 head of one layer, which reads its own states in the steps after the first."""

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
            states = self.rms(self.mlp(x, 0), self.norm)
            logits.append(states @ table.T)
        return logits


class Block(Layers):
    """A JetSpec head, whose rows read the text before their block and the rows of the block up to their own."""

    def split(self, read, layer: int, positions):
        """Returns rotated queries, rotated keys and values, `[B, H, N, K]`."""
        c = self.config
        heads = (read @ self.of(layer, "qkv")).view(*read.shape[:2], -1, c.head_dim).transpose(1, 2)
        queries, keys, values = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
        queries, keys = self.rms(queries, self.of(layer, "q_norm")), self.rms(keys, self.of(layer, "k_norm"))
        groups = c.num_heads // c.num_kv_heads
        entries = (self.turn(keys, positions[:, None]), values)
        return self.turn(queries, positions[:, None]), *(a.repeat_interleave(groups, 1) for a in entries)

    def forward(self, taps, embed, tokens, anchors):
        """Returns the states of the rows of the blocks at the anchors, `[B, A, b, E]`."""
        (batch, size), block, count = tokens.shape, self.sizes.block_size, anchors.shape[1]
        context = self.rms(taps @ self.fc, self.hidden_norm)
        root = tokens.gather(1, anchors + 1)
        ids = torch.full((batch, count, block), self.sizes.mask_token)
        ids[..., 0] = root
        x = embed[ids].view(batch, count * block, -1)
        positions = (anchors[..., None] + 1 + torch.arange(block)).view(batch, -1)
        text = torch.arange(size).expand(batch, size)
        far = text[:, None] <= anchors.repeat_interleave(block, 1)[..., None]
        place = torch.arange(count * block)
        near = (place[:, None] // block == place // block) & (place[:, None] >= place)
        sees = torch.cat([far, near.expand(batch, -1, -1)], -1)[:, None]
        for layer in range(self.config.num_layers):
            _, *seen = self.split(context, layer, text)
            queries, *own = self.split(self.rms(x, self.of(layer, "attn_norm")), layer, positions)
            keys, values = (torch.cat(pair, 2) for pair in zip(seen, own))
            mixed = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, sees)
            x = x + mixed.transpose(1, 2).reshape(batch, count * block, -1) @ self.of(layer, "out")
            x = self.mlp(x, layer)
        return self.rms(x, self.norm).view(batch, count, block, -1)


def torch_jetspec(features, tokens, table, drafted: int, trainee: DFlashTrainee, params: Any, settings: TrainSettings):
    """Returns the parameters in torch, and a function that returns the loss of a step as the only part."""
    head, width = Block(trainee.config, params), trainee.config.hidden_size
    embed, texts, features = torch.from_numpy(table), torch.from_numpy(tokens).long(), torch.from_numpy(features)
    law = (features[..., :width] @ embed[:drafted].T).log_softmax(-1)
    ones, size = jnp.ones_like(jnp.asarray(tokens)), tokens.shape[1]
    batch, blocks = (
        losses.Batch(jnp.asarray(tokens), ones, ones.astype(bool), jnp.asarray(features.numpy())),
        trainee.blocks,
    )
    assert blocks is not None
    step = 0

    def compute():
        nonlocal step
        keys = jax.random.split(jax.random.fold_in(jax.random.key(settings.seed), step), (1, len(tokens)))[0]
        anchors = torch.from_numpy(np.array(draw_anchors(batch._replace(key=keys), blocks.anchors))).long()
        step += 1
        states = head(features[..., width:], embed, texts, anchors)
        total, count = torch.zeros(()), 0
        for i in range(trainee.drafted):
            there = anchors + 2 + i < size
            rows, at = there.nonzero(as_tuple=True)
            known = law[rows, anchors[rows, at] + 1 + i]
            guess = (states[rows, at, i + trainee.config.skipped] @ embed[:drafted].T).log_softmax(-1)
            total, count = total + (known.exp() * (known - guess)).sum(), count + len(rows)
        yield total / count

    return list(head.parameters()), compute


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


def jax_stepper(
    features, tokens, table, drafted: int, trainee: Trainee, params: Any, settings: TrainSettings, mask: Any = None
):
    """Returns a function that takes a step in jaxspec and returns its loss; no mask: every token has a loss."""
    state = init_state(settings, trainee, Trainable(params))
    ones = np.ones_like(tokens)
    mask = ones.astype(bool) if mask is None else mask
    batch = losses.Batch(*(jnp.asarray(a)[None] for a in (tokens, ones, mask, features)))
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
    rng, eagle3, tapped = np.random.default_rng(0), args.kind == "eagle3", args.kind != "medusa"
    features = rng.normal(size=(args.rows, args.tokens, args.width * (1 + len(TAPS) * tapped))).astype(np.float32)
    table = (rng.normal(size=(args.vocab, args.width)) * args.width**-0.5).astype(np.float32)
    tokens = rng.integers(0, args.drafted, (args.rows, args.tokens)).astype(np.int32)
    loss = "kl" if tapped else "ce"
    settings = MedusaSettings(warmup=0, steps=10**6, batch=args.rows, loss=loss, learning_rate=1e-3)
    if args.kind == "jetspec":
        wide, layers = args.width * 8 // 3, len(TAPS)
        decoder = ModelConfig(
            args.vocab, args.width, wide, layers, args.width // 64, args.width // 192, 64, qk_norm=True
        )
        config = DFlashConfig(decoder, args.heads + 1, mask_token=0, causal=(True,) * layers, taps=TAPS)
        trainee = DFlashTrainee.of(config, BlockTraining(min(BLOCKS, args.tokens), math.inf))
        params = init_params(config, key=jax.random.key(0))
        parameters = torch_jetspec(features, tokens, table, args.drafted, trainee, params, settings)
    elif eagle3:  # sizes of SmolLM2-135M's layers
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


def take_turns(steppers: dict[str, Any], repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]], float]:
    """Returns the seconds of steps after the first, the losses of all steps, and their largest relative difference."""
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    values: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in range(repeats + 1):
        for name, step in steppers.items():
            began = time.perf_counter()
            values[name].append(step())
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds, values, max(abs(a - b) / b for a, b in zip(*values.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=("medusa", "eagle3", "jetspec"), default="medusa")
    sizes = {"rows": 4, "tokens": 256, "width": 576, "vocab": 49152, "drafted": 49152, "heads": 4, "repeats": 7}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json")
    add_record(parser.add_argument)
    args = parser.parse_args()
    if args.kind == "medusa" and args.drafted != args.vocab:
        parser.error(f"--drafted must be --vocab ({args.vocab}) for Medusa heads, got {args.drafted}")
    steppers = make_steppers(args)
    seconds, values, apart = take_turns(steppers, args.repeats)
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
