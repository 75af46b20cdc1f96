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
from helpers.medusa_files import write_torch
from helpers.tiers import with_slow
from helpers.toys import RAGGED
from jaxspec.bench.run import find_buildable
from jaxspec.checkpoints.pard2 import Pard2, parse_pard2
from jaxspec.checkpoints.saved import MANIFEST
from jaxspec.cli import main
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.networks import with_taps
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import Context, Window
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching, chain
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


@functools.partial(jax.jit, static_argnums=0)
def read(lm, params, text):
    """The features of a plain pass over a text, and its keys and values."""
    places = jnp.arange(len(text))[None]
    window = Window(jnp.asarray(text)[None], places, jnp.tri(len(text), dtype=bool)[None])
    return lm.apply(params, window, lm.init_cache(1, 0))


def passed(text, masked):
    """The laws of the draft model after a text and masks, and its keys and values."""
    features, entries = read(LM, DRAFT, masked)
    return jax.nn.log_softmax(LM.head(DRAFT, features), -1), entries


RANDOM = np.random.default_rng(0)
PROJECTION = {"weight": RANDOM.normal(size=(128, 64)) / 8, "bias": RANDOM.normal(size=64) / 8}


def passed_by_pard_2(text, masked):
    """The same with the projected states of the token before added to each embedding, in numpy, as amd's code does.

    The draft model has a row of embeddings for each place of the text.
    """
    features = np.asarray(read(with_taps(LM, (1,)), PARAMS, masked)[0])[0]
    states = np.concatenate([features[:, 64:], features[:, :64]], -1)  # after one layer, and the last
    before = np.concatenate([np.zeros_like(states[:1]), states])[np.minimum(np.arange(64), len(text) - 1)]
    added = 0.5 * (before @ PROJECTION["weight"] + PROJECTION["bias"])
    embed = jnp.asarray(np.asarray(DRAFT["embed"])[masked] + added, jnp.float32)
    features, entries = read(LM, DRAFT | {"embed": embed}, np.arange(64))
    return jax.nn.log_softmax(LM.head(DRAFT, features), -1), entries


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, params, state):
    """The proposal after a state, drawn with fresh noise by all rows, and the drafter's next state."""
    draw = Draw(Noise.FRESH, RoundNoise(state.key, state.length, jnp.array(True), V), state.sampling)
    return drafter.propose(params, state.draft, Context(state.tokens, state.length, state.cache, PARAMS), draw)


def check(drafter, params, state) -> set[int]:
    """Every law is that of a plain pass over text and masks, the cache that of a pass over the text.

    Returns:
        How many tokens of each row's text were not read before.
    """
    proposal, after = propose(drafter, params, state)
    parents, depths = drafter.tree.tree.parents, drafter.tree.tree.depths
    for row, text in enumerate(toys.texts(state)):
        masked = text + [MASK] * (64 - len(text))
        laws, entries = (passed_by_pard_2 if drafter.states else passed)(text, np.array(masked))
        for node in {parent for parent in parents.tolist() if parent >= 0}:
            expected = laws[0, len(text) - 1 + depths[node]]
            np.testing.assert_allclose(proposal.law[row, node], expected, atol=2e-5, err_msg=f"{row}, {node}")
        assert int(after.cache.length[row]) == len(text)
        for found, expected in zip(after.cache.stores, entries):
            found, expected = np.asarray(found)[:, row, :, : len(text)], np.asarray(expected)[:, 0, :, : len(text)]
            np.testing.assert_allclose(found, expected, atol=2e-5)
    return set(np.asarray(state.length - state.draft.cache.length).tolist())


@pytest.mark.parametrize(
    ("tree", "states"),
    [pytest.param(RAGGED, (), id="ragged"), pytest.param(chain(3), (1, None), id="PARD-2", marks=pytest.mark.slow)],
)
def test_the_rows_of_the_call_are_those_of_a_plain_pass(tree, states):
    """After prompts of one token and of several chunks, rounds, rounds without a draft, and a further turn."""
    drafter, params = Pard(LM, MASK, V, tree, states, 0.5), DRAFT
    if states:
        weight, bias = (jnp.asarray(PROJECTION[name], jnp.float32) for name in ("weight", "bias"))
        params = {"network": DRAFT, "projection": weight, "bias": bias}
    decoder, weights = toys.decoder(LM, drafter), Weights(PARAMS, params)
    asked = toys.request(PROMPTS, [30, 28, 29], vocab=V, temperature=1.0)
    state = toys.start(decoder, weights, asked, 64)
    assert check(drafter, params, state) == {1}
    unread = set()
    for _ in range(3):
        state = toys.step(decoder, weights, state)
        unread |= check(drafter, params, state)
    assert unread <= set(range(1, tree.shape.depth + 2))
    assert len(unread) > 1, "a test without accepted tokens shows nothing"
    idle = jax.jit(Decoder.step, static_argnums=0)
    for _ in range(tree.shape.depth + 3):
        state = idle(decoder, weights, state, jnp.int32(0))
    assert min(check(drafter, params, state)) > tree.shape.depth + 1
    state = toys.run(decoder, weights, state)
    more = toys.request([[3, 3], [1], [1, 2, 3, 4, 5, 6]], 5, vocab=V, temperature=1.0)
    state = toys.extend(decoder, weights, state, more)
    check(drafter, params, state)


@pytest.mark.parametrize("name", with_slow(TREES, TREES.keys() - {"ragged"}))
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
    named = model(settings={"pard_token": 1})
    with pytest.raises(MissingDraft, match="needs a draft model that was trained for it"):
        build(None)
    with pytest.raises(InvalidConfig, match=r"toy has no mask token.* pass the option pard_token"):
        build(model())
    for token in (V, -1, "5", True, 2.0):
        with pytest.raises(InvalidConfig, match=f"pard_token must be a whole number from 0 to {V - 1}, got"):
            build(model(), pard_token=token)
    with pytest.raises(InvalidConfig, match=f"from 0 to {V - 1}, got {V}"):
        build(model(settings={"pard_token": V}))
    with pytest.raises(VocabMismatch, match=f"toy has {V + 1} tokens and toy has {V}"):
        build(model(V + 1, settings={"pard_token": 1}))
    with pytest.raises(InvalidConfig, match="a tree of at least one drafted token"):
        build(named, chain(0))
    with pytest.raises(InvalidConfig, match="does not take exit_layers"):
        jaxspec.generate(model(), [1], drafter="pard", draft=named, drafter_options={"exit_layers": 1})
    one, other = (model(96, settings=named.settings, tokenizer=tokenizer) for tokenizer in tokenizers())
    with pytest.raises(VocabMismatch, match="or some tokens differ"):
        build(one, target=other)
    assert build(one, target=one)[0].token == 1


def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    """Two of equally many tokens, of which two are swapped."""
    entries: dict[str, Any] = VOCABULARY | {"tokenizer.ggml.model": "gpt2"}
    tokens = entries["tokenizer.ggml.tokens"]
    swapped = [*tokens[:5], tokens[6], tokens[5], *tokens[7:]]
    return Tokenizer.from_gguf(entries), Tokenizer.from_gguf(entries | {"tokenizer.ggml.tokens": swapped})


def test_the_option_goes_before_the_config_and_padding_may_be_the_mask():
    assert build(model(settings={"pard_token": 1}), pard_token=2)[0] == Pard(TABLE, 2, V, chain(8))
    lm = toys.transformer(vocab_size=V + 3)
    draft = jaxspec.Model(lm, {}, settings={"pard_token": V + 1})
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
    assert ("pard_token" in target.settings, draft.settings["pard_token"]) == (False, 261)
    assert jaxspec.load(jaxspec.save(draft, tmp_path / "saved")).settings == draft.settings
    assert main(["inspect", str(folders[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pard_token"] == 261
    assert main(["inspect", str(folders[0]), "--json"]) == 0
    assert "pard_token" not in json.loads(capsys.readouterr().out)
    assert {"model", "pard"} <= {method.label for method in find_buildable(target, draft)}
    assert "pard" not in [method.label for method in find_buildable(target, target)]


@pytest.mark.parametrize("token", [96, -1, "5", True])
def test_a_mask_token_outside_the_vocabulary_is_refused(token, tmp_path):
    config = tiny_config()
    folder = write_hf(tmp_path / "draft", config, random_params(config), settings={"pard_token": token})
    draft = jaxspec.load(folder)
    with pytest.raises(InvalidConfig, match="pard_token must be a whole number from 0 to 95, got"):
        build(draft, target=draft)


PARD_2 = {"pard_token": 5, "pard2": True, "pard2_target_layers": [1, -1], "pard2_target_dim": 128, "pard2_scale": 0.5}


def test_a_folder_of_pard_2_is_loaded_as_pard_and_reads_the_target_with_its_projection(tmp_path, capsys):
    config, held = tiny_config(), {f"target_proj.{name}": a.T.astype(np.float32, "C") for name, a in PROJECTION.items()}
    params = random_params(config)
    folder = write_hf(tmp_path / "draft", config, params, settings=PARD_2, tensors=held)
    loaded = jaxspec.load(folder)
    assert (loaded.settings["pard_token"], parse_pard2("draft", loaded.settings)) == (5, Pard2((1, -1), 0.5))
    saved = jaxspec.save(loaded, tmp_path / "saved")
    assert jaxspec.load(saved).settings == loaded.settings
    manifest = json.loads((saved / MANIFEST).read_text())
    older = {"pard_token": 5, "pard2": {"layers": [1, -1], "scale": 0.5}}
    (saved / MANIFEST).write_text(json.dumps({name: manifest[name] for name in manifest.keys() - {"settings"}} | older))
    assert jaxspec.load(saved).settings == {name: PARD_2[name] for name in PARD_2.keys() - {"pard2_target_dim"}}
    with pytest.raises(InvalidConfig, match=r"settings of .* cannot be saved"):
        jaxspec.save(dataclasses.replace(loaded, settings={"pard_token": b"5"}), tmp_path / "bytes")
    with pytest.raises(InvalidConfig, match="settings must be a mapping"):
        dataclasses.replace(loaded, settings=5)
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pard2_target_layers"] == "1, -1"
    target = dataclasses.replace(loaded, settings={"pard_token": 5})

    def reading(*layers):
        return dataclasses.replace(loaded, settings=PARD_2 | {"pard2_target_layers": list(layers)})

    assert build(loaded, target=target)[0] == Pard(loaded.lm, 5, loaded.lm.vocab)
    for source in (write_torch(tmp_path / "warp_model.bin", held), folder / "model.safetensors"):
        drafter, built = build(loaded, target=target, projection=str(source))
        assert (drafter.states, drafter.scale, drafter.needs.taps) == ((1, None), 0.5, (1,))
        for name in ("weight", "bias"):
            np.testing.assert_allclose(built["projection" if name == "weight" else name], PROJECTION[name], rtol=1e-6)
    for draft, change, said in (
        (target, {}, "is not a PARD-2 model: its config.json has no pard2_target_layers"),
        (
            reading(-1, -8),
            {},
            r"reads the states after layers \(-1, -8\) .* layers 1 to 2 \(or -2 to -1\)",
        ),
        (reading(0), {}, "reads the states"),
        (reading(-1), {}, r"the projection has shape \[128, 64\], expected \[64, 64\]"),
        (loaded, {"target_proj.weight": held["target_proj.weight"][:4]}, "bias has the shape"),
        (loaded, {"target_proj.weight": None}, "has no matrix target_proj.weight"),
    ):
        kept = {name: array for name, array in (held | change).items() if array is not None}
        source = write_torch(tmp_path / "other.bin", kept)
        with pytest.raises((InvalidConfig, CheckpointError), match=said):
            build(draft, target=target, projection=source)
    with pytest.raises(CheckpointError, match=r"no.bin: there is no such file; expected warp_model.bin"):
        build(loaded, target=target, projection=tmp_path / "no.bin")


@pytest.mark.parametrize("change", [{"pard2_target_layers": 3}, {"pard2_target_layers": []}, {"pard2_scale": "x"}])
def test_malformed_entries_of_pard_2_are_refused(change, tmp_path):
    config = tiny_config()
    folder = write_hf(tmp_path / "draft", config, random_params(config), settings=PARD_2 | change)
    draft = jaxspec.load(folder)
    with pytest.raises(CheckpointError, match=f"{draft.name}: {next(iter(change))} is"):
        build(draft, target=draft, projection="warp_model.bin")
    assert main(["inspect", str(folder), "--json"]) != 0


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
        (["generate", "x", "--drafter", "pard"], 2, "the drafter pard needs --draft-model SOURCE"),
        (["bench", "--drafters", "pard"], 2, "the drafter pard needs --draft-model SOURCE"),
        ([*words, "--drafter", "pard", "--draft-model", str(folders[0])], 1, "has no mask token"),
    ):
        assert main(call) == status
        assert expected in capsys.readouterr().err
