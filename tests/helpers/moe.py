"""Small networks with mixtures of experts."""

import dataclasses

import jax

from helpers.toys import lively, noisy
from jaxspec.models.config import DeltaSizes, Experts, ModelConfig
from jaxspec.models.transformer import TransformerLM

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_embeddings=False,
    qk_norm=True,
    experts=Experts(6, 2, 32, shared_width=24),
    sparse=(True, False, True),
)
LM = TransformerLM(CONFIG)
PARAMS = lively(LM.init_params(jax.random.key(0)))
DRAFT = noisy(PARAMS, 1, 0.05)
HYBRID = TransformerLM(
    dataclasses.replace(CONFIG, out_gate=True, delta=DeltaSizes(2, 4, 16, 16), recurrent=(True, False, True))
)
ON_FOUR = """
import json, sys
sys.path.insert(0, sys.argv[1])
from helpers import hybrids, moe
from jaxspec.models.quantized import quantize
params = [quantize(p) if sys.argv[2] == "int8" else p for p in (moe.PARAMS, moe.DRAFT)]
print(json.dumps(hybrids.on_four(moe.LM, *params)))
"""
