"""Small networks of attention and Gated DeltaNet."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from helpers.toys import SIZES, lively, noisy
from jaxspec.core.mesh import make_mesh
from jaxspec.models.config import DeltaSizes, ModelConfig
from jaxspec.models.sharding import shard
from jaxspec.models.transformer import TransformerLM

CONFIG = dataclasses.replace(SIZES, out_gate=True, delta=DeltaSizes(2, 4, 16, 16), recurrent=(True, True, False, True))
LM = TransformerLM(CONFIG)
PARAMS = lively(LM.init_params(jax.random.key(0)))
DRAFT = noisy(PARAMS, 1, 0.05)
ON_FOUR = """
import json, sys
sys.path.insert(0, sys.argv[1])
from helpers import hybrids
print(json.dumps(hybrids.on_four()))
"""


def tiny():
    """Returns a network of three tokens, and its parameters."""
    lm = TransformerLM(
        ModelConfig(3, 16, 16, 2, 1, 1, 8, tie_embeddings=False, delta=DeltaSizes(1, 2, 4, 4), recurrent=(True, False))
    )
    return lm, lively(lm.init_params(jax.random.key(3)), 3.0)


def noise(params, scale: float):
    return noisy(params, 9, scale)


def on_four() -> dict:
    """Decodes on one device and on four, of which two share each layer."""
    model, found = jaxspec.Model(LM, PARAMS), {}
    prompts = [[1, 2, 3, 4], [9, 8], [30, 31, 32, 30, 31], [5]]
    for name, shape in (("1x1", (1, 1)), ("2x2", (2, 2))):
        mesh = make_mesh(*shape, devices=jax.devices()[: int(np.prod(shape))])
        out = jaxspec.generate(
            model,
            prompts,
            key=jax.random.key(1),
            sampling=jaxspec.Sampling(temperature=[0.0, 0.8, 0.0, 0.8]),
            drafter="model",
            draft=jaxspec.Model(LM, DRAFT),
            tree=jaxspec.branching(2, 1),
            max_new_tokens=12,
            ignore_eos=True,
            mesh=mesh,
        )
        placed = jax.tree.leaves(shard(model, mesh).params)
        share = sum(jnp.asarray(leaf.addressable_shards[0].data).nbytes for leaf in placed)
        found[name] = {"tokens": [row.tokens for row in out], "accepted": out.stats.accepted, "share": share}
    return found
