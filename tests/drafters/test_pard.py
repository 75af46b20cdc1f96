"""Tests the drafter "pard": the rows of its call, its cache, texts under trees and rules, model folders, refusals."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from cases import LOSSLESS, RULES, TREES, WEIGHING, verifies
from helpers import toys
from helpers.checkpoints import VOCABULARY, random_params, tiny_config, write_bytes, write_hf
from helpers.toys import RAGGED
from jaxspec.bench.run import buildable
from jaxspec.cli import main
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import Context, Window
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import branching, chain
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.pard import Pard
from jaxspec.errors import CheckpointError, InvalidConfig, MissingDraft, VocabMismatch
from jaxspec.testing import TableLM, bias, model_law
from jaxspec.text import Tokenizer

V, MASK = 13, 11
LM = toys.transformer(vocab_size=V, num_layers=2)
PARAMS = toys.lively(LM.init_params(jax.random.key(0)), 2.0)
DRAFT = toys.noisy(PARAMS, 1, 0.3)
TABLE = TableLM(V)
TABLE_PARAMS = TABLE.init_params(jax.random.key(0))
TABLES = {
    "near": toys.noisy(TABLE_PARAMS, 1, 0.3),
    "wrong": TABLE.init_params(jax.random.key(9), 4.0),
    "nan": {"table": jnp.where(jnp.arange(V) % 3 == 0, jnp.nan, TABLE_PARAMS["table"])},
}
PROMPTS = [[1], [2, 3, 4, 5, 6, 7, 8, 9, 1], [5, 6, 7, 8]]


@jax.jit
def passed(texts):
    """The laws of a plain pass of the draft model, and its keys and values."""
    batch, size = texts.shape
    causal, places = (jnp.broadcast_to(a, (batch, *a.shape)) for a in (jnp.tri(size, dtype=bool), jnp.arange(size)))
    features, entries = LM.apply(DRAFT, Window(texts, places, causal), LM.init_cache(batch, 0))
    return jax.nn.log_softmax(LM.head(DRAFT, features), -1), entries


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, state):
    """The proposal after a state, drawn with fresh noise by all rows, and the drafter's next state."""
    draw = Draw(Noise.FRESH, RoundNoise(state.key, state.length, jnp.array(True), V), state.sampling)
    return drafter.propose(DRAFT, state.draft, Context(state.tokens, state.length, state.cache, PARAMS), draw)


def check(drafter, state) -> set[int]:
    """Every law is that of a plain pass over text and masks, the cache that of a pass over the text.

    Returns:
        How many tokens of each row's text were not read before.
    """
    proposal, after = propose(drafter, state)
    parents, depths = drafter.tree.tree.parents, drafter.tree.tree.depths
    for row, text in enumerate(toys.texts(state)):
        masked = text + [MASK] * (64 - len(text))
        laws, entries = passed(jnp.asarray([masked]))
        for node in {parent for parent in parents.tolist() if parent >= 0}:
            expected = laws[0, len(text) - 1 + depths[node]]
            np.testing.assert_allclose(proposal.law[row, node], expected, atol=2e-5, err_msg=f"{row}, {node}")
        assert int(after.cache.length[row]) == len(text)
        for found, expected in zip(after.cache.kv, entries):
            found, expected = np.asarray(found)[:, row, :, : len(text)], np.asarray(expected)[:, 0, :, : len(text)]
            np.testing.assert_allclose(found, expected, atol=2e-5)
    return set(np.asarray(state.length - state.draft.cache.length).tolist())


@pytest.mark.parametrize("tree", [chain(3), RAGGED], ids=["chain-3", "ragged"])
def test_the_rows_of_the_call_are_those_of_a_plain_pass(tree):
    """After prompts of one token and of several chunks, rounds, rounds without a draft, and a further turn."""
    drafter = Pard(LM, MASK, V, tree)
    decoder, weights = toys.decoder(LM, drafter), Weights(PARAMS, DRAFT)
    asked = toys.request(PROMPTS, [30, 28, 29], vocab=V, temperature=1.0)
    state = toys.start(decoder, weights, asked, 64)
    assert check(drafter, state) == {1}
    unread = set()
    for _ in range(3):
        state = toys.step(decoder, weights, state)
        unread |= check(drafter, state)
    assert unread <= set(range(1, tree.shape.depth + 2))
    assert len(unread) > 1, "a test without accepted tokens shows nothing"
    idle = jax.jit(Decoder.step, static_argnums=0)
    for _ in range(tree.shape.depth + 3):
        state = idle(decoder, weights, state, jnp.int32(0))
    assert min(check(drafter, state)) > tree.shape.depth + 1
    state = toys.run(decoder, weights, state)
    more = toys.request([[3, 3], [1], [1, 2, 3, 4, 5, 6]], 5, vocab=V, temperature=1.0)
    state = toys.extend(decoder, weights, state, more)
    check(drafter, state)


@pytest.mark.parametrize("name", TREES)
def test_texts_are_those_of_plain_decoding(name, seed):
    """64 random configurations: prompts, budgets, stops and settings; the mask is a token of the text, too."""
    asked = toys.random_request(seed, 64, V)
    plain = toys.texts(toys.generate(toys.decoder(TABLE, NoDraft()), Weights(TABLE_PARAMS), asked, 128))
    drafter, accepted = Pard(TABLE, MASK, V, TREES[name]), []
    for draft in TABLES.values():
        result: Any = toys.generate(toys.decoder(TABLE, drafter), Weights(TABLE_PARAMS, draft), asked, 128)
        assert toys.texts(result) == plain
        accepted.append(int(np.asarray(result.log.accepted).sum()))
    assert max(accepted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_every_rule_decodes(name):
    """Lossless rules at temperature 0 give plain decoding's text; all make progress."""
    asked = toys.request(PROMPTS, 12, vocab=V)
    config = Decoder(TABLE, Pard(TABLE, MASK, V, chain(2)), RULES[name], chunk=4)
    state = toys.whole(config, Weights(TABLE_PARAMS, TABLES["near"]), asked, 64)
    if name in LOSSLESS:
        plain = toys.whole(toys.decoder(TABLE, NoDraft()), Weights(TABLE_PARAMS), asked, 64)
        assert toys.texts(state) == toys.texts(plain)
    assert (np.asarray(state.length) > np.asarray(state.start)).all()


@pytest.mark.parametrize("name", [name for name in LOSSLESS if name in WEIGHING])
def test_lossless_rules_keep_the_targets_law(name):
    """Total variation below 1e-12, by enumeration: the draft's law depends on how many tokens were drafted alone."""
    rule, vocab, sampling = WEIGHING[name], 4, Sampling(temperature=1.0)
    lm = TableLM(vocab)
    params = lm.init_params(jax.random.key(2))
    target = model_law(lm, params, [1, 2], sampling)
    masked = [model_law(lm, toys.noisy(params, 1, 0.5), [1, 2, *[3] * count], sampling)(()) for count in range(4)]
    trees = [tree for tree in (chain(1), chain(3), branching(2, 1)) if verifies(rule, tree)]
    assert max(bias(rule, tree, target, lambda text: masked[len(text)]) for tree in trees) < 1e-12


@dataclasses.dataclass(frozen=True)
class Counted(TableLM):
    """Counts its calls when they run."""

    def apply(self, params, window, cache, past=None):
        jax.debug.callback(lambda: CALLS.append(window.tokens.shape[1]))
        return super().apply(params, window, cache, past)


CALLS: list[int] = []


def test_a_round_is_one_call():
    """Of D + 1 tokens of text and D - 1 masks; a prompt is read in chunks, a round without a draft reads nothing."""
    decoder = toys.decoder(TABLE, Pard(Counted(V), MASK, V, RAGGED))
    weights = Weights(TABLE_PARAMS, TABLES["near"])
    state = toys.start(decoder, weights, toys.request([PROMPTS[1]], 20, vocab=V), 64)
    jax.effects_barrier()
    assert CALLS == [4] * 3
    CALLS.clear()
    idle = jax.jit(Decoder.step, static_argnums=0)
    state = idle(decoder, weights, state, jnp.int32(0))
    jax.effects_barrier()
    assert CALLS == []
    state = toys.run(decoder, weights, state)
    jax.effects_barrier()
    assert [2 * RAGGED.shape.depth] * (int(state.round[0]) - 1) == CALLS
    assert decoder.drafter.calls == 1


# Building it.

BYTES = tiny_config(vocab_size=264, max_position=512)


def model(vocab: int = V, **changes) -> jaxspec.Model:
    return dataclasses.replace(jaxspec.Model(TableLM(vocab), TABLE_PARAMS, name="toy"), **changes)


def build(draft: jaxspec.Model | None, tree=None, target: jaxspec.Model | None = None, **options):
    return Pard.build(jaxspec.DrafterInputs(target or model(), draft, tree, options=options))


def test_what_does_not_fit_is_refused():
    with pytest.raises(MissingDraft, match="needs a draft model that was trained for it"):
        build(None)
    with pytest.raises(InvalidConfig, match=r"toy does not say which token .* pass the option pard_token"):
        build(model())
    for token in (V, -1, "5", True, 2.0):
        with pytest.raises(InvalidConfig, match=f"pard_token must be a whole number from 0 to {V - 1}, got"):
            build(model(), pard_token=token)
    with pytest.raises(InvalidConfig, match=f"from 0 to {V - 1}, got {V}"):
        build(model(pard_token=V))
    with pytest.raises(VocabMismatch, match=f"toy has {V + 1} tokens and toy {V}"):
        build(model(V + 1, pard_token=1))
    with pytest.raises(InvalidConfig, match="draft length of at least 1"):
        build(model(pard_token=1), chain(0))
    with pytest.raises(InvalidConfig, match="does not take exit_layers"):
        jaxspec.generate(model(), [1], drafter="pard", draft=model(pard_token=1), drafter_options={"exit_layers": 1})
    one, other = (model(96, pard_token=1, tokenizer=tokenizer) for tokenizer in tokenizers())
    with pytest.raises(VocabMismatch, match="or some of them differ"):
        build(one, target=other)
    assert build(one, target=one)[0].token == 1


def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    """Two of equally many tokens, of which two are swapped."""
    entries: dict[str, Any] = VOCABULARY | {"tokenizer.ggml.model": "gpt2"}
    tokens = entries["tokenizer.ggml.tokens"]
    swapped = [*tokens[:5], tokens[6], tokens[5], *tokens[7:]]
    return Tokenizer.from_gguf(entries), Tokenizer.from_gguf(entries | {"tokenizer.ggml.tokens": swapped})


def test_the_option_goes_before_the_config_and_padding_may_be_the_mask():
    assert build(model(pard_token=1), pard_token=2)[0] == Pard(TABLE, 2, V, chain(8))
    lm = toys.transformer(vocab_size=V + 3)
    draft = jaxspec.Model(lm, {}, pard_token=V + 1)
    target = jaxspec.Model(dataclasses.replace(lm, known=V), {})
    drafter = build(draft, target=target)[0]
    assert (drafter.token, drafter.vocab) == (V + 1, V)
    padded = dataclasses.replace(draft, lm=dataclasses.replace(lm, known=V))
    assert build(padded, target=target)[0].token == V + 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target of bytes, and a draft model of the same vocabulary that names its mask token."""
    place = tmp_path_factory.mktemp("pard")
    params = random_params(BYTES, 3)
    target = write_bytes(place / "target", BYTES, params)
    draft = write_bytes(place / "draft", BYTES, jax.tree.map(np.asarray, toys.noisy(params, 1, 0.1)))
    settings = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(settings | {"pard_token": 261}))
    return target, draft


def test_a_folder_of_pard_is_loaded_saved_and_inspected(folders, tmp_path, capsys):
    target, draft = (jaxspec.load(folder) for folder in folders)
    assert (target.pard_token, draft.pard_token) == (None, 261)
    assert jaxspec.load(jaxspec.save(draft, tmp_path / "saved")).pard_token == 261
    assert main(["inspect", str(folders[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pard_token"] == 261
    assert main(["inspect", str(folders[0]), "--json"]) == 0
    assert "pard_token" not in json.loads(capsys.readouterr().out)
    assert {"model", "pard"} <= {method.label for method in buildable(target, draft)}
    assert "pard" not in [method.label for method in buildable(target, target)]


@pytest.mark.parametrize("token", [96, -1, "5", True])
def test_a_mask_token_outside_the_vocabulary_is_refused(token, tmp_path):
    config = tiny_config()
    folder = write_hf(tmp_path / "draft", config, random_params(config), settings={"pard_token": token})
    with pytest.raises(CheckpointError, match=r"draft: pard_token .*, expected 0 \.\. 95"):
        jaxspec.load(folder)


def test_a_folder_of_pard_2_is_loaded_as_pard(tmp_path):
    config = tiny_config()
    settings = {"pard_token": 5, "pard2": True, "pard2_target_layers": [-1, -8], "pard2_target_dim": 128}
    more = {"target_proj.weight": np.zeros((64, 128), np.float32)}
    params = random_params(config)
    loaded = jaxspec.load(write_hf(tmp_path / "draft", config, params, settings=settings, tensors=more))
    assert loaded.pard_token == 5
    assert "target_proj" not in loaded.params


def test_commands_draft_with_a_folder_of_pard(folders, capsys):
    words = ["generate", "abcabc", "--target", str(folders[0]), "--no-chat", "--max-new-tokens", "16", "--json"]
    words += ["--temperature", "0.8", "--ignore-eos"]
    assert main([*words, "--drafter", "none"]) == 0
    (plain,) = json.loads(capsys.readouterr().out)
    assert main([*words, "--drafter", "pard", "--draft-model", str(folders[1]), "--draft-length", "3"]) == 0
    (drafted,) = json.loads(capsys.readouterr().out)
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["stats"]["drafted"] > 0
    assert drafted["stats"]["draft_calls"] <= drafted["stats"]["rounds"]
    for call, status, expected in (
        (["generate", "x", "--drafter", "pard"], 2, "--drafter pard needs --draft-model SOURCE"),
        (["bench", "--drafters", "pard"], 2, "the drafter pard needs --draft-model SOURCE"),
        ([*words, "--drafter", "pard", "--draft-model", str(folders[0])], 1, "does not say which token"),
    ):
        assert main(call) == status
        assert expected in capsys.readouterr().err
