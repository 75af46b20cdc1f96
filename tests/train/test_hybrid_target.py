"""Tests training for a target of attention and Gated DeltaNet: features, taps, gradients of the target, MTP layers."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxspec
from helpers import hybrids, toys
from helpers.tiers import with_slow
from helpers.trainees import SOURCE, TOKENIZER, WORDS, train, write_prompts
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.network import DraftHeads, init_params
from jaxspec.models.transformer import TransformerLM
from jaxspec.text import ChatTemplate
from jaxspec.train.eagle_settings import Eagle1Settings, Eagle3Settings
from jaxspec.train.medusa_settings import MedusaSettings

CONFIG = dataclasses.replace(hybrids.CONFIG, vocab_size=len(WORDS))
LM = TransformerLM(CONFIG)
KINDS = {
    "medusa": MedusaSettings(heads=2),
    "medusa2": MedusaSettings(heads=2, medusa2=True, medusa2_warmup=2, cache_features=False, loss="ce"),
    "eagle3": Eagle3Settings(depth=2, taps="1,2,4"),
}


def target() -> jaxspec.Model:
    params = toys.lively(LM.init_params(jax.random.key(0)))
    return jaxspec.Model(LM, params, TOKENIZER, ChatTemplate(SOURCE), (0,), "hybrid")


@pytest.mark.parametrize("kind", with_slow(KINDS, {"medusa", "eagle3"}))
def test_heads_learn_to_draft(tmp_path, kind):
    model = target()
    trained = train(model, write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out", of=KINDS[kind], steps=24)
    losses = [record["loss"] for record in trained.log if "loss" in record]
    assert losses[-1] < losses[0]
    if kind == "medusa2":
        for name in ("qkvz", "rates", "conv", "decay", "decay_bias", "gate_norm"):
            before, after = (each.params["layers"][0][name] for each in (model, trained.target))
            assert not np.array_equal(before, after), name


def mtp() -> DraftHeads:
    """Returns a random layer for multi-token prediction."""
    decoder = dataclasses.replace(CONFIG, num_layers=1, delta=None, recurrent=())
    config = EagleConfig(decoder, 1, norm_output=True, pair_norms=True)
    return DraftHeads(config, init_params(config, key=jax.random.key(1)))


@pytest.mark.slow
def test_training_continues_a_layer_for_multi_token_prediction(tmp_path):
    """Its gates and norms are kept, and it drafts for the target afterwards."""
    model, start = target(), mtp()
    jaxspec.save_heads(start, tmp_path / "start")
    settings = Eagle1Settings(start=str(tmp_path / "start"))
    trained = train(model, write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out", of=settings, steps=24)
    losses = [record["loss"] for record in trained.log if "loss" in record]
    assert losses[-1] < losses[0]
    assert trained.heads.config == start.config
    for name in ("embed_norm", "hidden_norm", "norm"):
        assert not np.array_equal(trained.heads.params[name], start.params[name]), name
    options = {"key": jax.random.key(0), "max_new_tokens": 16}
    out = jaxspec.generate(model, ["abc", "dd"], drafter="eagle", heads=trained.heads, **options)
    plain = jaxspec.generate(model, ["abc", "dd"], drafter="none", **options)
    assert [row.tokens for row in out] == [row.tokens for row in plain]
