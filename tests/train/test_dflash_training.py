"""Tests DFlash, DSpark and JetSpec heads in training: DeepSpec's losses, the drafter's laws, and what rows see."""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import narrow, trainees
from helpers.dflash_golden import TRAINED, directions, supervision
from helpers.dflash_heads import FILES
from helpers.paths import GOLDEN_DIR
from helpers.tiers import with_slow
from jaxspec.core import cache as caches
from jaxspec.core.records import KV
from jaxspec.errors import InvalidConfig
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.dflash_layouts import DFLASH
from jaxspec.heads.layouts import LAYOUTS
from jaxspec.heads.network import flatten, init_cache, make_network
from jaxspec.models.layers import look_up, matmul
from jaxspec.models.rope import Rope
from jaxspec.train import calibration, dflash, losses
from jaxspec.train import step as steps
from jaxspec.train.batch import Batch, FrozenTarget, draw_anchors, find_supervised
from jaxspec.train.dflash import DFlashTrainee
from jaxspec.train.files import fingerprint
from jaxspec.train.log import LOG_FILE, Watch
from jaxspec.train.packing import Text, pack_texts
from jaxspec.train.trainee import BlockTraining

GOLDEN = json.loads((GOLDEN_DIR / "dflash_losses.json").read_text())["cases"]
LM = trainees.LM
V, E = LM.vocab, LM.config.hidden_size
TWO = dataclasses.replace(LM.config, num_layers=2, rope=Rope(100.0), qk_norm=True)
IDS = np.arange(0, V, 2)
LENGTHS = (9, 6, 12)
CONFIGS = {
    "dflash": DFlashConfig(TWO, 4, V - 1, taps=(1, 2)),
    "jetspec": DFlashConfig(TWO, 4, V - 1, causal=(True, True), taps=(1, 2)),
    "dflash, sliding": DFlashConfig(
        dataclasses.replace(TWO, window=4, windowed=(True, False)), 4, 3, True, causal=(True, False), taps=(2,)
    ),
    "dspark": DFlashConfig(
        TWO, 3, 5, True, taps=(1, 1, 2), markov="rnn", markov_rank=6, confidence=True, confidence_reads_token=True,
        draft_vocab_size=len(IDS),
    ),
}  # fmt: skip


def trainee(name: str) -> DFlashTrainee:
    return DFlashTrainee.of(CONFIGS[name], BlockTraining(5, 4.0, 1.0))


@functools.cache
def target() -> jaxspec.Model:
    return trainees.target()


@functools.cache
def batch(name: str) -> Batch:
    """Three texts in two rows, and features at random."""
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(0, V, n).astype(np.int32), np.arange(n) >= n // 4) for n in LENGTHS]
    packed, _ = pack_texts(texts, 16)
    assert packed.segments.max() == 2
    features = rng.normal(size=(2, 16, (1 + CONFIGS[name].num_taps) * E)).astype(np.float32)
    return Batch(*map(jnp.asarray, (*packed, features)))


@functools.cache
def inputs(name: str) -> tuple[dict, FrozenTarget]:
    """Parameters of which none is that of a beginning, and the target's tables."""
    ids, rng = IDS if CONFIGS[name].draft_vocab_size else None, np.random.default_rng(2)
    params = jax.tree.map(
        lambda leaf: leaf + 0.2 * jnp.asarray(rng.normal(size=leaf.shape), jnp.float32),
        trainee(name).init_params(target(), ids),
    )
    return params, losses.freeze(trainee(name), LM, target().params, ids, laws=True)


# DeepSpec's step.


@pytest.mark.parametrize("name", with_slow(TRAINED, TRAINED.keys() - {"DSpark"}))
def test_losses_and_gradients_are_deepspecs(name, tmp_path, monkeypatch):
    """To 1e-5 of the loss and of each gradient's norm, and so is the norm of a whole step; and the same acceptance."""
    expected, weights = GOLDEN[name], TRAINED[name]["weights"]
    settings = jaxspec.DSparkSettings(
        loss="ce-l1" if weights["l1"] else "ce", ce_share=weights["ce"], batch=1, clip=0.0
    )
    heads = jaxspec.load_heads(FILES[name].write(tmp_path))
    config = dataclasses.replace(heads.config, own_embedding=False, own_projection=False)
    params = {key: leaf for key, leaf in heads.params.items() if key not in ("embed", "head")}
    frozen = FrozenTarget(heads.params["head"], None, heads.params["embed"], None)
    one = DFlashTrainee.of(config, BlockTraining(TRAINED[name]["anchors"], 4.0, weights["confidence"]))
    tokens, mask, features = supervision(name)
    places = np.zeros((2, TRAINED[name]["anchors"]), np.int32)  # where nothing is wanted
    for row, anchors in zip(places, expected["anchors"]):
        row[: len(anchors)] = np.array(anchors) - 1
    whole = Batch(*map(jnp.asarray, (tokens, np.ones_like(tokens), mask, features)))

    def loss(params):
        def weigh(sums):
            each = losses.head_weights(settings, sums.top1, gamma=4.0)
            return each / (each * sums.counted).sum()

        batch = whole._replace(anchors=jnp.asarray(places))
        return trainees.weighted(settings, one, params, frozen, batch, weigh)

    (value, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert value == pytest.approx(expected["loss"], rel=1e-5)
    assert found.blocks is not None
    shares = found.blocks.average(np.asarray(found.seen))
    np.testing.assert_allclose(shares["acceptance"], expected["acceptance"], rtol=1e-5)
    assert shares["tau"] == pytest.approx(expected["tau"], rel=1e-5)
    renamed = DFLASH.tensors(config, flatten(gradient), LAYOUTS["dflash-speculators"])  # named as in an exported file
    assert set(renamed) == set(expected["gradients"])
    along = directions(name, {key: array.shape for key, array in renamed.items()})
    for key, (norm, product) in expected["gradients"].items():
        assert np.linalg.norm(renamed[key]) == pytest.approx(norm, rel=1e-5), key
        tolerance = 1e-5 * norm * float(np.linalg.norm(along[key]))
        assert (renamed[key] * along[key]).sum() == pytest.approx(product, abs=tolerance), key
    monkeypatch.setattr(steps, "draw_anchors", lambda part, count: jnp.asarray(places))
    begun = steps.init_state(settings, one, steps.Trainable(params))
    _, report = steps.train_step(settings, one, LM, frozen, begun, jax.tree.map(lambda leaf: leaf[None], whole))
    assert report.loss == pytest.approx(expected["loss"], rel=1e-5)
    norms = [norm for norm, _ in expected["gradients"].values()]
    assert report.gradient == pytest.approx(math.hypot(*norms), rel=1e-5)


# Our drafter's laws.


@functools.partial(jax.jit, static_argnums=0)
def rounds(config: DFlashConfig, params, frozen: FrozenTarget, text, features):
    """The logits `[S, n, R]` of a block after every token of a text, one batch row each, by the drafter's cache."""
    size, head = len(text), make_network(config, params)
    here, rows = jnp.arange(size), jnp.arange(config.block_size)
    context = head.fuse(jnp.broadcast_to(features, (size, *features.shape)))
    entries = head.remember(context, jnp.broadcast_to(here, (size, size)), "float32")
    cache = caches.append_to_cache(
        init_cache(config, size, 64, "float32"), entries, None, here + 1, jnp.zeros(size, jnp.int32)
    )
    after = jnp.append(text[1:], jnp.zeros(config.block_size + 1, text.dtype))[here[:, None] + jnp.arange(9)]
    block = jnp.where(rows == 0, after[:, :1], config.mask_token)
    states = head(look_up(narrow.not_none(frozen.embed), block), here[:, None] + 1 + rows, cache)[:, config.skipped :]
    logits, memory = matmul(states, frozen.rows, transposed=True), jnp.zeros((size, 1, config.memory))
    if config.markov is None:
        return logits
    corrected = []
    for step in range(config.max_depth):
        words = head.words(after[:, step : step + 1])
        followed, memory = head.follow(words, states[:, step : step + 1], memory)
        corrected.append(logits[:, step] + head.correction(followed)[:, 0])
    return jnp.stack(corrected, 1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def unroll(name: str, replaced: tuple, params, frozen: FrozenTarget, rows: Batch) -> jax.Array:
    """`replaced` is what tests replace, so that it is traced again."""
    return jnp.stack(list(trainee(name).unroll_logits(params, frozen, rows)))


def guesses(name: str, rows: Batch) -> jax.Array:
    """The logits `[n, B, A, R]` of training."""
    return unroll(name, (dflash.BLOCKS_AT_ONCE, dflash.attend_to_text_and_block), *inputs(name), rows)


@pytest.mark.parametrize("name", with_slow(CONFIGS, ("dflash", "jetspec", "dflash, sliding")))
@pytest.mark.slow
def test_each_block_is_the_drafters_with_the_same_tokens(name, monkeypatch):
    """At every place of every packed text, and at places that are drawn."""
    monkeypatch.setattr(dflash, "BLOCKS_AT_ONCE", 5)
    (params, frozen), config, rows = inputs(name), CONFIGS[name], batch(name)
    params = params if frozen.ids is None else params | {"tokens": jnp.asarray(frozen.ids)}
    unrolled, compared, longest = guesses(name, rows), 0, max(LENGTHS)
    for row in range(len(rows.tokens)):
        for number in range(1, int(rows.segments[row].max()) + 1):
            there = np.flatnonzero(rows.segments[row] == number)
            text, features = np.zeros(longest, np.int32), np.zeros((longest, rows.features.shape[-1]), np.float32)
            text[: len(there)], features[: len(there)] = rows.tokens[row, there], rows.features[row, there]
            found = rounds(config, params, frozen, text, features)
            for each in range(config.max_depth):
                last = len(there) - 1 - each  # the places whose token before is in the text
                np.testing.assert_allclose(unrolled[each, row, there[:last]], found[:last, each], rtol=1e-5, atol=2e-5)
                compared += last
    assert compared == sum(n - 1 - each for n in LENGTHS for each in range(config.max_depth))
    places = jnp.array([[3, 0, 14], [7, 8, 2]])
    np.testing.assert_allclose(
        guesses(name, rows._replace(anchors=places)),
        jnp.take_along_axis(unrolled, places[None, ..., None], 2),
        atol=1e-5,
    )


def influence(name: str) -> tuple[float, float]:
    """How much logits of a place depend on what a round there does not know yet, and on what it knows."""
    rows, rng = batch(name), np.random.default_rng(4)
    row, place = 0, 4  # in a text of 9 or 12 tokens, which another follows
    rows = rows._replace(anchors=jnp.full((2, 1), place))
    plain = guesses(name, rows)[:, row]
    new = jnp.asarray(rng.normal(size=rows.features.shape), jnp.float32)
    later = 0.0
    place_of = jnp.arange(rows.tokens.shape[1])[:, None]
    unknown = guesses(name, rows._replace(features=jnp.where(place_of > place, new, rows.features)))[:, row]
    later = max(later, float(jnp.abs(unknown - plain).max()))
    for step in range(len(plain)):  # the token that a row names, and those after it
        tokens = rows.tokens.at[:, place + 2 + step :].add(1) % V
        later = max(later, float(jnp.abs(guesses(name, rows._replace(tokens=tokens))[step, row] - plain[step]).max()))
    seen = guesses(name, rows._replace(features=jnp.where(place_of == place, new, rows.features)))[:, row]
    known = float(jnp.abs(seen - plain).max((1, 2)).min())
    return later, known


@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_sees_nothing_of_its_own_future(name, monkeypatch):
    later, known = influence(name)
    assert later == 0
    assert known > 1e-3
    attend = dflash.attend_to_text_and_block

    def leaking(queries, text, own, sees, near, scale):
        return attend(queries, text, own, sees | jnp.roll(sees, 1, -1), near, scale)  # the root's own state, too

    monkeypatch.setattr(dflash, "attend_to_text_and_block", leaking)
    assert influence(name)[0] > 1e-3


@pytest.mark.parametrize("name", ["dflash", "jetspec"])
def test_a_shorter_block_guesses_the_same_only_if_it_is_causal(name):
    """So a drafter may leave out the last rows of a JetSpec head's block, and of no other's."""
    (params, frozen), rows = inputs(name), batch(name)._replace(anchors=jnp.array([[3, 0], [7, 2]]))
    whole, part = (
        jnp.stack(list(DFlashTrainee.of(dataclasses.replace(CONFIGS[name], block_size=size)).unroll_logits(
            params, frozen, rows
        )))[:2]
        for size in (4, 3)
    )  # fmt: skip
    assert (float(jnp.abs(whole - part).max()) < 1e-4) == (name == "jetspec")


def test_the_settings_of_jetspec():
    """Causal blocks, also when training starts from a DFlash head; equal weights; the divergence as loss."""
    settings = jaxspec.JetSpecSettings(layers=2, block=4)
    made = narrow.instance(DFlashTrainee, settings.trainee(target()))
    assert (made.config.causal, made.config.from_anchor, made.config.max_depth) == ((True, True), False, 3)
    assert made.config.kind == "JetSpec"
    assert settings.loss == "kl"
    weights = losses.head_weights(settings, jnp.ones(3), narrow.not_none(made.blocks).gamma)
    assert weights.tolist() == [1, 1, 1]
    start = jaxspec.DraftHeads(CONFIGS["dflash"], {}, name="a start")
    begun = narrow.instance(DFlashTrainee, DFlashTrainee.make(jaxspec.JetSpecSettings(), target(), start))
    assert begun.config == CONFIGS["jetspec"]
    with pytest.raises(InvalidConfig, match=r"block \(--block\) is 8, but the heads to start from have 4"):
        DFlashTrainee.make(jaxspec.JetSpecSettings(block=8), target(), start)
    with pytest.raises(InvalidConfig, match="gamma must be finite and at least 0"):
        jaxspec.JetSpecSettings(gamma=-1.0)


def test_a_block_sees_no_other_text_and_no_other_block():
    name = "dspark"
    rows = batch(name)
    starts = np.flatnonzero(np.diff(np.asarray(rows.segments[0])) == 1)
    assert len(starts), "two texts in the row"
    first = int(starts[0]) + 1
    places = jnp.full((2, 2), first + 1).at[:, 1].set(1)
    rows = rows._replace(anchors=places)
    features = rows.features.at[:, :first].set(3.0)
    found = [guesses(name, each)[:, 0, 0] for each in (
        rows, rows._replace(features=features), rows._replace(anchors=places.at[:, 1].set(2))
    )]  # fmt: skip
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


def test_attention_in_bfloat16_is_that_in_float32():
    """In sizes at which XLA:CPU has no bfloat16 product of the block's columns."""
    rng = np.random.default_rng(3)
    queries = rng.normal(size=(2, 3, 3, 20, 64)).astype(np.float32)
    text, own = (rng.normal(size=(2, 2, 3, size, 64)).astype(np.float32) for size in (16, 20))
    sees = jnp.arange(16) <= jnp.arange(3, 7)[None, :, None, None]
    attend = jax.jit(dflash.attend_to_text_and_block, static_argnums=5)
    halves = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (queries, KV(*text), KV(*own)))
    near = jnp.ones((5, 5), bool)
    sees = jnp.broadcast_to(sees, (2, 4, 1, 16))
    expected = attend(*jax.tree.map(lambda a: a.astype(jnp.float32), halves), sees, near, 0.125)
    found = attend(*halves, sees, near, 0.125)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=0.02)


# Anchors and confidence.


def test_places_are_drawn_by_key_where_the_assistant_writes():
    rows = batch("dspark")
    there = np.asarray(find_supervised(rows, 0))

    def drawn(key, count):
        keys = jax.random.split(jax.random.key(key), len(there))
        return np.asarray(draw_anchors(rows._replace(key=keys), count))

    assert (drawn(0, 4) == drawn(0, 4)).all()
    assert (drawn(0, 4) != drawn(1, 4)).any()
    every = [drawn(key, 4) for key in range(40)]
    for row in range(len(there)):
        for found in every:
            assert len(set(found[row])) == 4
            assert there[row, found[row]].all()
        assert {int(place) for found in every for place in found[row]} == set(np.flatnonzero(there[row]))
    assert drawn(0, 99).shape == rows.tokens.shape


def test_a_token_of_a_block_counts_if_all_before_it_do():
    mask = jnp.array([[0, 0, 1, 1, 0, 1, 1, 1, 0, 0]], bool)
    rows = Batch(jnp.zeros((1, 10), jnp.int32), jnp.array([[1] * 8 + [0] * 2]), mask, jnp.zeros((1, 10, 1)))
    found = ["".join(str(int(bit)) for bit in find_supervised(rows, step, blocks=True)[0]) for step in range(3)]
    assert found == ["1101110000", "1001100000", "0001000000"]
    assert find_supervised(rows, 1)[0].tolist() == [True, False, True, True, True] + [False] * 5


def test_reliability_is_the_table_by_hand():
    rng = np.random.default_rng(5)
    certainty, acceptance, there = rng.normal(size=(3, 7)) * 3, rng.random((3, 7)), rng.random((3, 7)) < 0.7
    sums = calibration.BlockSums.zeros(2)
    sums = sums.add(1, *map(jnp.asarray, (there, acceptance, np.where(there, acceptance, 0), certainty)))
    found = sums.average(np.array([1, there.sum()]))
    confidence = 1 / (1 + np.exp(-certainty))
    assert found["acceptance"] == pytest.approx([0, acceptance[there].mean()])
    error = 0.0
    for number in range(calibration.NUM_BINS):
        inside = there & (confidence >= number / 10) & (confidence < (number + 1) / 10)
        assert found["confidence"]["tokens"][number] == inside.sum()
        if inside.any():
            assert found["confidence"]["confidence"][number] == pytest.approx(confidence[inside].mean())
            assert found["confidence"]["acceptance"][number] == pytest.approx(acceptance[inside].mean())
            error += abs((confidence - acceptance)[inside].sum()) / there.sum()
        else:
            assert found["confidence"]["confidence"][number] is None
    assert found["confidence"]["error"] == pytest.approx(error, rel=1e-5)


def test_the_diagram_is_of_the_table(tmp_path, monkeypatch):
    from matplotlib import pyplot

    bins = np.zeros((calibration.NUM_BINS, 3))
    bins[[2, 9]] = [[4, 1.0, 2.0], [10, 9.5, 9.0]]
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    assert not calibration.draw_diagram({}, tmp_path / "none.png")
    assert calibration.draw_diagram({"confidence": calibration.reliability(bins)}, tmp_path / "diagram.png")
    upper, lower = drawn[0].axes
    np.testing.assert_allclose(upper.lines[1].get_xydata(), [[0.25, 0.5], [0.95, 0.9]])
    assert [bar.get_height() for bar in lower.patches] == [0, 0, 4, 0, 0, 0, 0, 0, 0, 10]
    assert (tmp_path / "diagram.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.undo()
    pyplot.close(drawn[0])


# Whole runs.


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return trainees.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


SMALL: dict[str, Any] = {"layers": 1, "anchors": 16}
KINDS = {
    "dspark": jaxspec.DSparkSettings(block=3, markov_rank=8, **SMALL),
    "dflash": jaxspec.DFlashSettings(block=4, **SMALL),
    "jetspec": jaxspec.JetSpecSettings(block=4, **SMALL),
}

MORE = dataclasses.replace(KINDS["dspark"], layers=2, taps="1,2", anchors=64)


@pytest.mark.slow
def test_a_head_that_knows_its_texts_drafts_them(prompts, tmp_path):
    """Nearly all of a chain is accepted where the head was trained, as training says; the confidence knows it."""
    settings = {"steps": 240, "held_out": 0.05, "learning_rate": 1e-2, "warmup": 10, "log_every": 40, "eval_every": 240}
    trained = trainees.train(target(), prompts, tmp_path, of=MORE, **settings | {"save_every": 240})
    last = [record for record in trained.log if "loss" in record][-1]
    assert last["accepted"] == sorted(last["accepted"], reverse=True)
    assert last["accepted_length"] > 3.7
    assert last["tau"] > 2.8  # the target's distribution is wide
    assert sum(last["confidence"]["tokens"]) > 0
    assert last["confidence"]["error"] < 0.05
    assert trained.heads.config.taps == (1, 2)
    asked = [json.loads(line)["prompt"] for line in pathlib.Path(prompts).read_text().splitlines()][:12]
    drafting = {"drafter": "dflash", "heads": trained.heads, "tree": 3}
    drafted = jaxspec.generate(target(), asked, max_new_tokens=20, width_matched=False, **drafting)
    plain = jaxspec.generate(target(), asked, max_new_tokens=20, drafter="none")
    assert [row.tokens for row in drafted] == [row.tokens for row in plain]
    assert min(drafted.stats.conditional_acceptance) > 0.9
    assert "| confidence | tokens |" in "\n".join(calibration.format_figures(calibration.best_figures(trained.log)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_ended_goes_on_to_the_same_bits(kind, prompts, tmp_path):
    """The blocks are those of the step, too."""

    class Ended(Exception):
        pass

    def end(step, steps, record):
        if step >= 9:
            raise Ended

    lines = []
    train = functools.partial(trainees.train, target(), prompts, data=tmp_path / "data", of=KINDS[kind])
    whole = train(tmp_path / "whole")
    with pytest.raises(Ended):
        train(tmp_path / "parts", Watch(step=end))
    parts = train(tmp_path / "parts", Watch(say=lines.append))
    assert "resumes after step 6" in lines
    assert fingerprint(parts.heads.params) == fingerprint(whole.heads.params)
    assert (tmp_path / "parts" / LOG_FILE).read_bytes() == (tmp_path / "whole" / LOG_FILE).read_bytes()
    by_step = [record["loss"] for record in whole.log if "loss" in record]
    assert by_step[-1] < by_step[0]


def test_heads_that_cannot_be_are_refused_at_once():
    for make, why in (
        (lambda: jaxspec.DSparkSettings(taps="2,x"), "taps must be numbers of layers such as '2,15,27', got '2,x'"),
        (lambda: jaxspec.DFlashSettings(block=1), "block must be at least 2"),
        (lambda: jaxspec.DSparkSettings(markov="none"), "markov must be one of vanilla, gated, rnn"),
        (lambda: jaxspec.DFlashSettings(taps="3").trainee(target()), "taps must be whole numbers from 1 to 2"),
        (lambda: jaxspec.DFlashSettings(mask_token=V).trainee(target()), f"mask_token must be below the target's {V}"),
        (lambda: jaxspec.DSparkSettings(decay=0.9), "set gamma instead of decay"),
        (lambda: jaxspec.DSparkSettings(ce_share=1.5), "ce_share must be at most 1"),
    ):
        with pytest.raises(InvalidConfig, match=why):
            make()
    assert [jaxspec.DFlashSettings().loss, jaxspec.DSparkSettings().loss] == ["ce", "ce-l1"]
    assert [jaxspec.DFlashSettings().drafted, jaxspec.DSparkSettings().drafted] == [15, 7]
    assert narrow.instance(DFlashTrainee, jaxspec.DSparkSettings().trainee(target())).config.mask_token == V - 1
