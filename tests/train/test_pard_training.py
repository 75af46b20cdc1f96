"""Tests PARD models in training: losses of one dense mask, the drafter's rows, whole runs, files, and refusals."""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxspec
from helpers import toys, trainees
from helpers.checkpoints import hf_config, hf_tensors, random_params, tiny_config, write_hf
from helpers.narrow import instance, not_none
from jaxspec.cli import main
from jaxspec.drafters.pard import Pard
from jaxspec.errors import CheckpointError, InvalidConfig, VocabMismatch
from jaxspec.train import evaluate, losses, pard
from jaxspec.train import step as steps
from jaxspec.train.batch import Batch, FrozenTarget, draw_anchors, limit_anchors
from jaxspec.train.files import fingerprint
from jaxspec.train.log import LOG_FILE, Watch
from jaxspec.train.packing import Text, pack_texts
from jaxspec.train.pard import PardTrainee

LM = trainees.LM
V, K = LM.vocab, 4
LENGTHS = (9, 6, 12)
SETTINGS = jaxspec.PardSettings(depth=K, pard_token=V - 2, retention=0.6, retention_min=0.3, start="draft")
CE = dataclasses.replace(SETTINGS, batch=2, clip=0.0)


@functools.cache
def target() -> jaxspec.Model:
    return trainees.target()


@functools.cache
def draft() -> jaxspec.Model:
    return dataclasses.replace(target(), params=toys.noisy(target().params, 1, 0.3), name="draft")


def trainee(settings: jaxspec.PardSettings = SETTINGS, start: jaxspec.Model | None = None) -> PardTrainee:
    return instance(PardTrainee, settings.trainee(target(), start or draft()))


@functools.cache
def batch() -> Batch:
    """Three texts in two rows, of which the assistant wrote all but the beginning."""
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(0, V, n).astype(np.int32), np.arange(n) >= n // 4) for n in LENGTHS]
    packed, _ = pack_texts(texts, 16)
    assert packed.segments.max() == 2
    return Batch(
        *map(jnp.asarray, (*packed, np.zeros((2, 16, 0), np.float32))), key=jax.random.split(jax.random.key(5), 2)
    )


# The losses.


def plain(params, tokens, positions, mask):
    """The logits of a transformer as `LM`, of one sequence with a dense mask, written out."""
    c = LM.config
    x = params["embed"][tokens]
    angles = positions[:, None] * 10000.0 ** (-jnp.arange(0, c.head_dim, 2) / c.head_dim)
    cosine, sine = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    def norm(x, scale):
        return scale * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps)

    def turn(x):
        left, right = jnp.split(x, 2, -1)
        return jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], -1)

    for layer in params["layers"].values():
        heads = (norm(x, layer["attn_norm"]) @ layer["qkv"]).reshape(len(x), -1, c.head_dim)
        queries, keys, values = jnp.split(heads, (c.num_heads, c.num_heads + c.num_kv_heads), 1)
        keys, values = (jnp.repeat(a, c.num_heads // c.num_kv_heads, 1) for a in (turn(keys), values))
        scores = jnp.einsum("thk,shk->hts", turn(queries), keys) * c.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
        x = x + jnp.einsum("hts,shk->thk", weights, values).reshape(len(x), -1) @ layer["out"]
        gate, up = jnp.split(norm(x, layer["mlp_norm"]) @ layer["gate_up"], 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ layer["down"]
    return norm(x, params["norm"]) @ params["head"].T


def laid_out(tokens, supervised, places) -> list[np.ndarray]:
    """One text and K - 1 copies of masks, as amd's `pard_train.py` lays them out, and of each the rows that are kept.

    Copy i has a mask at each position, which names the token after it, and sees the text up to i positions before, and
    the masks of the copies before it, each one position earlier.

    Args:
        tokens: the text.
        supervised: the tokens that the assistant wrote.
        places: for each copy, the positions of the roots behind which it has a mask.

    Returns:
        Tokens, positions, mask, labels and the copy of each row; labels are -1 where there is no loss.
    """
    size = len(tokens)
    rows = [(0, i) for i in range(size)] + [(i, at + i) for i in range(1, K) for at in sorted(places[i])]
    mask = np.zeros((len(rows), len(rows)), bool)
    for a, (copy, at) in enumerate(rows):
        for b, (other, there) in enumerate(rows):
            mask[a, b] = there <= at - copy if other == 0 else 0 < other <= copy and at - copy == there - other
    written = [tokens[at] if copy == 0 else SETTINGS.pard_token for copy, at in rows]
    labels = [
        tokens[at + 1] if at + 1 < size and at - copy >= 1 and supervised[at - copy + 1 : at + 2].all() else -1
        for copy, at in rows
    ]
    copies = [copy for copy, _ in rows]
    return [np.array(each) for each in (written, [at for _, at in rows], mask, labels, copies)]


def texts_of(rows: Batch):
    """The row of each text, and the positions of its tokens there."""
    segments = np.asarray(rows.segments)
    return [
        (r, np.flatnonzero(segments[r] == n)) for r in range(len(segments)) for n in range(1, segments[r].max() + 1)
    ]


def test_losses_and_gradients_are_those_of_one_dense_mask():
    """A step's, to 1e-5 of the loss and of each gradient's norm: one mean over all tokens that are kept."""
    one, rows = trainee(), batch()
    (key,) = jax.random.split(jax.random.fold_in(jax.random.key(CE.seed), 0), (1, 2))
    drawn = rows._replace(anchors=draw_anchors(rows._replace(key=key), None))
    shares = [np.asarray(not_none(limit_anchors(drawn, one.blocks.shares, step).anchors)) for step in range(K)]
    sequences = []
    for r, there in texts_of(rows):

        def behind(step, r=r, there=there):
            """Roots in the text; masks behind its end have no label, and nothing that has one sees them."""
            return {int(place) + 1 - there[0] for place in shares[step][r]} & set(range(len(there) - step))

        roots = [behind(step) for step in range(K)]
        sequences.append(laid_out(np.asarray(rows.tokens)[r, there], np.asarray(rows.mask)[r, there], roots))

    def expected(params):
        totals = jnp.zeros((2, K))
        for tokens, positions, mask, labels, copies in sequences:
            laws = jax.nn.log_softmax(plain(params, tokens, positions, mask), -1)
            each = -laws[np.arange(len(labels)), np.maximum(labels, 0)] * (labels >= 0)
            totals += jnp.stack([each, 1.0 * (labels >= 0)]) @ (copies[:, None] == np.arange(K))
        return totals[0].sum() / totals[1].sum(), totals

    step = jax.jit(functools.partial(steps.train_step, CE, one, LM))
    begun = steps.init_state(CE, one, steps.Trainable(draft().params))
    with jax.default_matmul_precision("highest"):
        (value, each), gradient = jax.jit(jax.value_and_grad(expected, has_aux=True))(draft().params)
        state, report = step(
            FrozenTarget.empty(), begun, jax.tree.map(lambda leaf: leaf[None], rows._replace(key=None))
        )
    counts = np.asarray(each[1])
    assert counts[0] == sum(n - max(n // 4, 2) for n in LENGTHS)
    assert (counts[1:] > 0).all()
    assert (np.diff(counts) < 0).all(), "some are dropped"
    np.testing.assert_allclose([state.window.loss, state.window.counted], each, rtol=1e-5)
    assert report.loss == pytest.approx(float(value), rel=1e-5)
    assert report.gradient == pytest.approx(float(optax.global_norm(gradient)), rel=1e-5)

    def is_adam(leaf):
        return isinstance(leaf, optax.ScaleByAdamState)

    moments = next(leaf.mu.heads for leaf in jax.tree.leaves(state.opt, is_leaf=is_adam) if is_adam(leaf))
    for (path, own), (_, right) in zip(*map(jax.tree_util.tree_leaves_with_path, (moments, gradient)), strict=True):
        # After one step the first moment is a tenth of the gradient.
        assert np.linalg.norm(10 * own - right) <= 1e-5 * np.linalg.norm(right), path


# The drafter's rows.


@functools.partial(jax.jit, static_argnums=0)
def rounds(drafter: Pard, params, text):
    """The logits `[S, K, V]` of a round after every token of a text, by the drafter's own call on its cache."""
    size = len(text)
    texts, lengths = jnp.broadcast_to(text, (size, size)), jnp.full(size, size)
    state, _ = drafter.read(params, drafter.init(params, size, 64), texts, lengths, size)
    roots = jnp.arange(size)
    before = state._replace(cache=state.cache._replace(length=roots))
    return drafter.head(params, drafter.read(params, before, texts, roots + 1, 1, K - 1)[1])


@functools.partial(jax.jit, static_argnums=(0, 1))
def unroll(one: PardTrainee, chunk: int, params, rows: Batch) -> list[jax.Array]:
    """The logits of training. `chunk` is what tests replace, so that it is traced again."""
    return list(one.unroll_logits(params, FrozenTarget.empty(), rows))


def test_each_row_is_the_drafters_with_the_same_tokens(monkeypatch):
    """At every place of every packed text, and at places that are drawn, of which fewer have more masks."""
    monkeypatch.setattr(pard, "BLOCKS_AT_ONCE", 5)
    one, rows, compared = trainee(), batch(), 0
    drafter = Pard(LM, SETTINGS.pard_token, V, jaxspec.chain(K))
    every = unroll(one, pard.BLOCKS_AT_ONCE, draft().params, rows)
    for r, there in texts_of(rows):
        text = np.zeros(max(LENGTHS), np.int32)
        text[: len(there)] = rows.tokens[r, there]
        expected = rounds(drafter, draft().params, text)
        for step in range(K):
            np.testing.assert_allclose(every[step][r, there[:-1]], expected[1 : len(there), step], atol=2e-5)
            compared += len(there) - 1
    assert compared == K * sum(n - 1 for n in LENGTHS)
    drawn = rows._replace(anchors=draw_anchors(rows, None))
    counts = []
    for step, found in enumerate(unroll(one, pard.BLOCKS_AT_ONCE, draft().params, drawn)):
        places = not_none(limit_anchors(drawn, one.blocks.shares, step).anchors)
        counts.append(places.shape[1])
        at = (np.asarray(rows.segments) == np.roll(rows.segments, -1, 1)) & np.asarray(rows.segments > 0)
        inside = np.take_along_axis(at, np.asarray(places), 1)  # the root is in the text, too
        wanted = np.take_along_axis(np.asarray(every[step]), np.asarray(places)[:, :, None], 1)
        np.testing.assert_allclose(found[inside], wanted[inside], atol=2e-5)
    assert counts == [16, 9, 5, 4]


def test_places_thin_out_by_the_retention():
    """The places with one more mask are among those with one mask less; those where a loss is wanted come first."""
    assert trainee(jaxspec.PardSettings(start="draft")).blocks.shares == pytest.approx(
        (1, 0.7, 0.49, 0.343, 0.2401, 0.2, 0.2, 0.2)
    )
    rows = batch()
    drawn = rows._replace(anchors=draw_anchors(rows, None))
    before = None
    for step in range(K):
        places = np.asarray(not_none(limit_anchors(drawn, trainee().blocks.shares, step).anchors))
        assert all(len(set(row)) == len(row) for row in places)
        assert before is None or (places == before[:, : places.shape[1]]).all()
        before = places
    assert limit_anchors(rows, trainee().blocks.shares, 2) is rows
    other = draw_anchors(rows._replace(key=jax.random.split(jax.random.key(6), 2)), None)
    assert (np.asarray(other) != np.asarray(drawn.anchors)).any()


def test_the_law_of_the_target_is_computed_only_for_a_loss_that_needs_it():
    """Cross-entropy reads nothing of it; KL to a target that is the draft itself is 0 for the first token.

    Rows that pad the vocabulary are no tokens, and places that thin out are those of all sums.
    """
    assert not losses.needs_features(CE, trainee())
    kl, lm, rows = dataclasses.replace(SETTINGS, loss="kl"), dataclasses.replace(LM, known=V - 3), batch()
    padded = dataclasses.replace(draft(), lm=lm)
    one = instance(PardTrainee, SETTINGS.trainee(padded, padded))
    assert (one.vocab_size, one.token) == (V - 3, V - 2)
    assert losses.needs_features(kl, one)
    rows = rows._replace(tokens=rows.tokens % (V - 3), anchors=draw_anchors(rows, None), key=None)

    @jax.jit
    def sums(params, rows):
        features, frozen = (
            steps.compute_features(lm, params, rows.tokens, rows.segments),
            losses.freeze(one, lm, params),
        )
        return losses.sum_losses(kl, one, params, frozen, rows._replace(features=features))

    found = sums(draft().params, rows)
    assert found.loss[0] / found.counted[0] == pytest.approx(0, abs=1e-5)
    assert (found.loss[1:] / found.counted[1:] > 0.01).all()
    shared = not_none(found.blocks)
    assert shared.acceptance[0] / found.seen[0] == pytest.approx(1, abs=1e-5)
    assert (np.diff(shared.running) < 0).all()


# Whole runs.


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return trainees.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The draft model to start from, a Hugging Face directory with the target's tokenizer."""
    place = tmp_path_factory.mktemp("start") / "draft"
    params = jax.tree.map(np.asarray, draft().params)
    config = LM.config
    write_hf(place, config, params | {"layers": list(params["layers"].values())}, settings={"eos_token_id": 0})
    trainees.TOKENIZER.save(place)
    return str(place)


FEW: dict[str, Any] = {"learning_rate": 3e-3}


@pytest.mark.slow
def test_a_run_that_was_ended_goes_on_to_the_same_bits(start, tmp_path):
    """The places are those of the step, too. With answers in the file, the target computes nothing."""

    class Ended(Exception):
        pass

    def end(step, steps, record):
        if step >= 3:
            raise Ended

    rng, texts = np.random.default_rng(1), tmp_path / "texts.jsonl"
    rows = [{"prompt": rng.integers(4, V, 5).tolist(), "answer": rng.integers(4, V, 20).tolist()} for _ in range(12)]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    blind = dataclasses.replace(target(), params={})
    few = {"distill": False, "steps": 4, "log_every": 1, "save_every": 2, "eval_every": 4} | FEW
    of = dataclasses.replace(SETTINGS, depth=2)
    train = functools.partial(trainees.train, blind, str(texts), of=of, start=start, **few)
    whole, lines = train(tmp_path / "whole"), []
    with pytest.raises(Ended):
        train(tmp_path / "parts", Watch(step=end))
    parts = train(tmp_path / "parts", Watch(say=lines.append))
    assert "resumes after step 2" in lines
    assert fingerprint(parts.draft.params) == fingerprint(whole.draft.params) != fingerprint(draft().params)
    assert (tmp_path / "parts" / LOG_FILE).read_bytes() == (tmp_path / "whole" / LOG_FILE).read_bytes()
    by_step = [record["loss"] for record in whole.log if "loss" in record]
    assert by_step[-1] < by_step[0]
    assert {path.name for path in (tmp_path / "whole").iterdir() if path.is_dir()} == {"checkpoints"}
    assert (whole.draft.settings["pard_token"], whole.draft.tokenizer is None) == (V - 2, False)
    with pytest.raises(InvalidConfig, match=r"a draft model, not heads; read `\.draft`"):
        _ = whole.heads


@pytest.mark.slow
def test_a_model_that_knows_its_texts_drafts_them(prompts, start, tmp_path):
    """Nearly all of a chain is accepted where the model was trained, as training says."""
    settings = {"steps": 240, "held_out": 0.05, "learning_rate": 1e-2, "warmup": 10, "log_every": 40, "eval_every": 240}
    trained = trainees.train(target(), prompts, tmp_path, of=SETTINGS, start=start, **settings | {"save_every": 240})
    last = [record for record in trained.log if "loss" in record][-1]
    assert last["accepted"] == sorted(last["accepted"], reverse=True)
    assert last["accepted_length"] > K + 0.7
    asked = [json.loads(line)["prompt"] for line in pathlib.Path(prompts).read_text().splitlines()][:12]
    drafted = jaxspec.generate(target(), asked, max_new_tokens=20, drafter="pard", draft=trained.draft, tree=K)
    plain = jaxspec.generate(target(), asked, max_new_tokens=20, drafter="none")
    assert [row.tokens for row in drafted] == [row.tokens for row in plain]
    assert min(drafted.stats.conditional_acceptance) > 0.9


@pytest.mark.slow
def test_the_command_writes_a_folder_as_the_one_it_started_from(prompts, start, tmp_path, monkeypatch, capsys):
    """With the mask token in its config.json; by KL to the target, whose features are read for that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "TREE_SIZES", (1, 3))
    saved = jaxspec.save(target(), tmp_path / "target")
    words = ["train", "pard", "--target", str(saved), "--start", start, "--prompts", prompts, "--out", "run"]
    words += ["--fit-prompts", "1", "--depth", "3", "--loss", "kl"]
    for name, value in (trainees.TINY | FEW).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "PARD model for target" in out
    assert "names 3 tokens in one call, mask token 60" in out
    assert "step 12 of 12" in err
    assert "Mass of the law of each token that the target shares" in out.replace("\n", " ")
    assert (tmp_path / "run" / "features").is_dir()
    folder = tmp_path / "run" / "draft"
    assert {path.name for path in folder.iterdir()} == {path.name for path in pathlib.Path(start).iterdir()} | {
        "README.md", "evaluation.json",
    }  # fmt: skip
    model = jaxspec.load(folder, kernels=False)
    assert (model.settings["pard_token"], model.stop_ids) == (V - 1, (0,))
    assert f"sha256 of the parameters: `{fingerprint(model.params)}`" in (folder / "README.md").read_text()
    assert [tree["nodes"] for tree in json.loads((folder / "evaluation.json").read_text())["trees"]] == [1, 3]
    assert main(["fingerprint", "run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{fingerprint(model.params)}  run/draft"
    assert main(words) == 0, "the same command writes the same folder again"


# Files.


def test_an_exported_model_has_the_tensors_of_the_one_it_came_from(tmp_path):
    """To the bit, in the same files; config.json has the mask token and the dtype besides."""
    from safetensors.numpy import load_file

    config = tiny_config(tie_embeddings=False)
    params = random_params(config)
    tokenizer = {"tokenizer_config.json": {"model_max_length": 7}, "merges.txt": "#version: 0.2\n"}
    settings = {"torch_dtype": "bfloat16", "rope_scaling": {"type": "linear", "factor": 2.0}}
    source = write_hf(tmp_path / "start", config, params, shards=2, settings=settings, files=tokenizer)
    model = dataclasses.replace(jaxspec.load(source), settings={"pard_token": 95})
    place = jaxspec.export_model(model, tmp_path / "draft", like=source)
    assert json.loads((place / "config.json").read_text()) == hf_config(config, **settings) | {
        "torch_dtype": "float32", "pard_token": 95, "spd_type": "pard",
    }  # fmt: skip
    found, expected = load_file(place / "model.safetensors"), hf_tensors(config, params)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert (place / "merges.txt").read_bytes() == (source / "merges.txt").read_bytes()
    assert jaxspec.load(place).settings["pard_token"] == 95
    halves = jaxspec.load(source, dtype="bfloat16")
    again = jaxspec.load(jaxspec.export_model(halves, tmp_path / "halves", like=source), dtype="bfloat16")
    assert fingerprint(again.params) == fingerprint(halves.params)
    other = write_hf(tmp_path / "other", tiny_config(), random_params(tiny_config()))
    for call, error, why in (
        (lambda: jaxspec.export_model(model, place, like=source), CheckpointError, "already exists"),
        (lambda: jaxspec.export_model(model, tmp_path / "x", like=other), InvalidConfig, "have different sizes"),
        (
            lambda: jaxspec.export_model(model, tmp_path / "x", like=jaxspec.save(model, tmp_path / "own")),
            CheckpointError,
            "own: has no config.json, expected a model in the Hugging Face format",
        ),
        (
            lambda: jaxspec.export_model(jaxspec.load(source, dtype="int8"), tmp_path / "x", like=source),
            InvalidConfig,
            "has quantized weights",
        ),
    ):
        with pytest.raises(error, match=why):
            call()
    assert not (tmp_path / "x").exists()


def test_models_that_cannot_be_trained_are_refused_at_once(prompts, start, tmp_path, capsys):
    second = {"pard2": True, "pard2_target_layers": [1]}
    longer = jaxspec.Model(toys.transformer(vocab_size=V + 1), {}, name="longer")
    for make, error, why in (
        (lambda: jaxspec.PardSettings(depth=0), InvalidConfig, "depth must be a whole number from 1, got 0"),
        (lambda: jaxspec.PardSettings(retention=1.5), InvalidConfig, "retention must be at most 1, got 1.5"),
        (lambda: jaxspec.PardSettings(retention_min=-1), InvalidConfig, "retention_min must be finite and at least 0"),
        (lambda: jaxspec.PardSettings(), InvalidConfig, r"from a draft model: set start \(--start\)"),
        (lambda: dataclasses.replace(CE, draft_vocab=9), InvalidConfig, "draft_vocab at 0"),
        (lambda: dataclasses.replace(CE, decay=0.5), InvalidConfig, "retention instead of"),
        (lambda: SETTINGS.trainee(target(), None), InvalidConfig, "is trained from a draft model"),
        (lambda: jaxspec.OnlineHeads.of(target(), SETTINGS), InvalidConfig, "settings must be of heads"),
        (
            lambda: jaxspec.PardSettings(pard_token=V, start="draft").trainee(target(), draft()),
            InvalidConfig,
            f"pard_token must be a whole number from 0 to {V - 1}, got {V}",
        ),
        (lambda: SETTINGS.trainee(target(), longer), VocabMismatch, f"longer has {V + 1} tokens and tiny has {V}"),
        (
            lambda: SETTINGS.trainee(target(), dataclasses.replace(draft(), settings=second)),
            InvalidConfig,
            "is a PARD-2 model",
        ),
        (lambda: evaluate.trainee_of(draft()), InvalidConfig, "whose training is not recorded"),
    ):
        with pytest.raises(error, match=why):
            make()
    assert (SETTINGS.learning_rate, jaxspec.MedusaSettings().learning_rate) == (3e-5, 1e-3)
    own = dataclasses.replace(draft(), settings={"pard_token": 7})
    assert trainee(jaxspec.PardSettings(start="draft"), own).token == 7
    assert trainee(jaxspec.PardSettings(start="draft")).token == V - 1
    assert trainee(SETTINGS, own).token == V - 2
    words = ["train", "pard", "--prompts", prompts, "--out", str(tmp_path / "run")]
    assert main(words) == 2
    assert "set start (--start)" in capsys.readouterr().err
    assert main([*words, "--start", start, "--heads", "3"]) == 2
    assert "--heads is a setting of medusa, not of pard" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
