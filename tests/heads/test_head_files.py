"""Tests files of Medusa heads: every layout read and written bit for bit, and every fault refused by name."""

import contextlib
import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from helpers import medusa_files as files
from helpers import toys
from helpers.narrow import instance
from jaxspec.checkpoints import hub
from jaxspec.errors import CheckpointError, InvalidConfig, JaxspecError, ShapeMismatch, UnknownName
from jaxspec.heads.export import export_heads
from jaxspec.heads.files import load_heads, save_heads
from jaxspec.heads.find import find_layout
from jaxspec.heads.headers import open_heads
from jaxspec.heads.layouts import LAYOUTS
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.medusa_layouts import WHOLE_MODEL_NOTE
from jaxspec.heads.network import DraftHeads, flatten, init_params, make_network

pytestmark = pytest.mark.quick

CASES = ("v0.1", "legacy", "v1.0", "vllm", "vllm-single", "vllm-reduced")
TARGET = toys.transformer()
PARAMS = toys.lively(TARGET.init_params(jax.random.key(0)))
PROJECTION = instance(jax.Array, TARGET.unembedding(PARAMS))
MODEL = jaxspec.Model(TARGET, PARAMS)


def by_hand(layout: str, held: dict, head: int, x: np.ndarray) -> np.ndarray:
    """A head's logits, from the tensors as their own system would read them."""
    held = {name.removeprefix("medusa_head."): a.astype(np.float64) for name, a in held.items()}
    block = "blocks.{}.layers.{}.{}" if layout.startswith("vllm") else "{}.{}.linear.{}"
    for j in range(1 if layout == "legacy" else 2):
        inner = held[block.format(head, j, "weight")] @ x + held[block.format(head, j, "bias")]
        x = x + inner / (1 + np.exp(-inner))
    names = (f"{head}.2.weight", f"lm_heads.{head}.weight", "lm_head.weight")
    return next((held[name] for name in names if name in held), np.asarray(PROJECTION, float)) @ x


@pytest.mark.parametrize("layout", CASES)
def test_heads_are_those_of_the_file(tmp_path, layout):
    held = files.tensors(layout)
    heads = load_heads(files.write(tmp_path, layout), target=MODEL)
    assert heads.config == HeadsConfig(
        64, 61, 3, 1 if layout == "legacy" else 2,
        projection={"legacy": "shared", "vllm-single": "single"}.get(layout, "own"),
        draft_vocab_size=20 if layout == "vllm-reduced" else None,
    )  # fmt: skip
    x = np.random.default_rng(0).normal(size=64)
    net = make_network(heads.config, heads.params)
    for i in range(3):
        features = net.features(i, jnp.asarray(x, jnp.float32)[None, None])
        logits = TARGET.head(PARAMS, features) if layout == "legacy" else net.logits(i, features)
        np.testing.assert_allclose(logits[0, 0], by_hand(layout, held, i, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, files.BF16])
@pytest.mark.parametrize("layout", CASES)
def test_round_trips_to_the_bit(tmp_path, layout, dtype):
    """There and back, and through our own directory."""
    held = files.tensors(layout, dtype=dtype)
    heads = load_heads(files.write(tmp_path / "in", layout, held), dtype=None)
    again = load_heads(save_heads(heads, tmp_path / "ours"), dtype=None)
    assert again.config == heads.config
    to = "v0.1" if layout == "v1.0" else layout.partition("-")[0]
    for i, one in enumerate((heads, again)):
        place = export_heads(one, tmp_path / str(i), to)
        (file,) = place.glob("*.safetensors")
        written = load_file(file)
        assert written.keys() == {name.removeprefix("medusa_head.") for name in held}
        for name, array in held.items():
            got = written[name.removeprefix("medusa_head.")]
            assert got.dtype == array.dtype
            np.testing.assert_array_equal(got, array)
        back = load_heads(place, dtype=None)
        assert back.config == heads.config
        assert back.notes == ()
        chex.assert_trees_all_equal(back.params, heads.params)
    single = load_heads(tmp_path / "in")
    assert {a.dtype for name, a in flatten(single.params).items() if name != "tokens"} == {np.dtype(np.float32)}


# --- every fault of every tensor ----------------------------------------------------------------------------------


def damaged(held: dict):
    """(what, the tensors, a word of the message) for every tensor."""
    for name, array in held.items():
        rest = {key: a for key, a in held.items() if key != name}
        yield "dropped", rest, name
        yield "renamed", rest | {name + "_": array}, name
        yield "longer", held | {name: np.concatenate([array, array[:1]])}, name
        yield "deeper", held | {name: array[None]}, name
        yield "retyped", held | {name: array.astype(np.int16)}, name
        if array.ndim == 2:
            yield "wider", held | {name: np.concatenate([array, array[:, :1]], 1)}, name
        if name != "token_map":
            yield "not a number", held | {name: np.where(np.arange(len(array)) == 1, np.nan, array.T).T}, name
    yield "more", held | {"more": np.zeros(3, np.float32)}, "more"


@pytest.mark.parametrize("layout", CASES)
def test_every_tensor(tmp_path, layout):
    for what, held, word in damaged(files.tensors(layout)):
        if layout == "v1.0":  # what has another name is the model's
            held = {"medusa_head." + name.removeprefix("medusa_head."): a for name, a in held.items()}
        held = {
            name: np.ascontiguousarray(a, np.float32 if a.dtype == np.float64 else a.dtype) for name, a in held.items()
        }
        place = files.write(tmp_path, layout, held)
        if (what, word) in (("longer", "lm_head.weight"), ("dropped", "token_map")):  # heads, but of another vocabulary
            rows = 62 if what == "longer" else 20
            assert f"config.json says vocab_size 61, but the tensors say {rows}" in load_heads(place).notes
            with pytest.raises(ShapeMismatch, match=f"a vocabulary of {rows}, but model has 61"):
                load_heads(place, target=MODEL)
            continue
        with pytest.raises(CheckpointError, match=word.replace(".", r"\.")) as caught:
            load_heads(place)
        assert str(tmp_path) in str(caught.value), what


def changed(layout: str, drop: str = "") -> dict:
    """A layout's tensors without some."""
    return {name: a for name, a in files.tensors(layout).items() if not drop or not name.startswith(drop)}


WIDE, SQUARE, WIDTH = np.zeros((61, 64), np.float32), np.zeros((64, 64), np.float32), np.zeros(64, np.float32)
ODD = {
    "a head is missing": ("v0.1", changed("v0.1", "1."), r"missing: 1\.0\.linear\.bias, 1"),
    "a head's block is missing": ("v0.1", changed("v0.1", "1.1.linear"), r"missing: 1\.1\.linear\.bias, 1"),
    "a head has one more": ("v0.1", changed("v0.1") | {"1.2.linear.weight": SQUARE}, "0.2.linear.bias"),
    "a head far off": ("v0.1", changed("v0.1") | {"9999.0.linear.weight": SQUARE}, "has 9999.0.linear"),
    "a number with a zero": ("v0.1", changed("v0.1", "2.2.") | {"2.02.weight": WIDE}, "missing: 2.2.weight"),
    "more than digits": ("v0.1", changed("v0.1") | {"9" * 5000 + ".0.weight": WIDE}, "not expected"),
    "other rows": ("v0.1", changed("v0.1") | {"1.2.weight": WIDE[:60]}, r"1.2.weight has shape \[60, 64\]"),
    "another width": ("v0.1", changed("v0.1") | {"1.2.weight": WIDE[:, :63]}, "1.2.weight has shape"),
    "two legacy blocks": ("legacy", changed("legacy") | {"0.1.linear.weight": SQUARE}, "0.2.weight missing"),
    "prefixed by half": ("vllm", changed("vllm", "blocks.1.layers.0.weight")
                         | {"medusa_heads.blocks.1.layers.0.weight": SQUARE}, "missing: medusa_heads.blocks"),
    "biased by half": ("vllm", changed("vllm", "blocks.1.layers.0.bias"), "missing: blocks.1.layers.0.bias"),
    "two projections": ("vllm", changed("vllm") | {"lm_head.weight": WIDE}, "not expected: lm_heads.0.weight"),
    "ids twice": ("vllm", changed("vllm-reduced") | {"token_map": np.zeros(20, int)}, "token_map must hold ids"),
    "ids below": ("vllm", changed("vllm-reduced") | {"token_map": np.arange(20) - 1}, "token_map must hold ids"),
    "ids above": ("vllm", changed("vllm-reduced") | {"token_map": np.arange(42, 62)}, "from 0 to 60"),
    "ids of all": ("vllm", changed("vllm-reduced") | {"token_map": np.arange(21)}, "lm_heads.0.weight has shape"),
    "no heads": ("v0.1", {"model.norm.weight": WIDTH}, "holds no draft heads"),
    "nothing": ("v0.1", {}, "holds no draft heads"),
    "of no width": ("v0.1", {"0.0.weight": np.zeros((0, 0), np.float32)}, "hidden_size"),
    "scalars": ("v0.1", {"0.0.weight": np.array(1, np.float32)}, "hidden_size"),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_what_does_not_go_together(tmp_path, what):
    layout, held, said = ODD[what]
    with pytest.raises(CheckpointError, match=said):
        load_heads(files.write(tmp_path, layout, held))


# --- what config.json says ------------------------------------------------------------------------------------------


def test_tensors_are_believed(tmp_path):
    """The heads of Vicuna 7B say two and have five."""
    told = files.settings("v0.1", medusa_num_heads=2, medusa_num_layers=7, hidden_size="wide")
    heads = load_heads(files.write(tmp_path, "v0.1", files.tensors("v0.1", 5), told))
    assert (heads.config.num_heads, heads.config.num_layers) == (5, 2)
    assert [note.partition(" says ")[2] for note in heads.notes] == [
        "medusa_num_heads 2, but the tensors say 5",
        "medusa_num_layers 7, but the tensors say 2",
        "hidden_size 'wide', but the tensors say 64",
    ]
    aliased = files.settings("vllm", num_heads=None, num_medusa_heads=4)
    assert load_heads(files.write(tmp_path / "d", "vllm", None, aliased)).notes == (
        "config.json says num_medusa_heads 4, but the tensors say 3",
    )


def test_without_a_config(tmp_path):
    place = files.write(tmp_path, "v0.1")
    (place / "config.json").unlink()
    assert load_heads(place / "medusa_lm_head.safetensors").config.num_heads == 3
    place = files.write(tmp_path / "b", "legacy", told={})
    with pytest.raises(InvalidConfig, match="give the target"):
        load_heads(place)
    assert load_heads(place, target=MODEL).config.vocab_size == 61
    for wrong in (0, True, "61", 6.1, None):
        (place / "config.json").write_text(json.dumps({"vocab_size": wrong}))
        with pytest.raises(InvalidConfig, match="give the target"):
            load_heads(place)
    (place / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        load_heads(place)
    with pytest.raises(CheckpointError, match="holds no heads"):
        load_heads(tmp_path / "b" / "config.json")
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match="holds no heads"):
        load_heads(tmp_path / "c")
    with pytest.raises(CheckpointError, match="no such file"):
        load_heads("./nowhere")


def test_reduced_vocabularies(tmp_path):
    """The ids of a token map may stand in any order, and its projections may have all rows."""
    held = files.tensors("vllm-reduced")
    wanted = load_heads(files.write(tmp_path / "0", "vllm", held))
    order = np.random.default_rng(0).permutation(20)
    turned = {n: a[order] if n == "token_map" or n.startswith("lm_heads") else a for n, a in held.items()}
    full = {n: np.random.default_rng(1).normal(size=(61, 64)).astype(np.float32) for n in held if "lm_heads" in n}
    for name in full:
        full[name][held["token_map"]] = held[name]
    for i, tensors in enumerate((turned, held | full)):
        heads = load_heads(files.write(tmp_path / f"{i + 1}", "vllm", tensors, files.settings("vllm", vocab_size=61)))
        assert heads.config == wanted.config
        chex.assert_trees_all_equal(heads.params, wanted.params)
    first = {name: a for name, a in held.items() if name != "token_map"}
    told = files.settings("vllm", truncated_vocab_size=20)
    heads = load_heads(files.write(tmp_path / "first", "vllm", first, told))
    assert heads.params["tokens"].tolist() == list(range(20))
    place = files.write(tmp_path / "untold", "vllm", held, {})
    assert load_heads(place, target=MODEL).config == wanted.config
    with pytest.raises(InvalidConfig, match="give the target"):
        load_heads(place)


def test_one_projection_under_the_first_heads_name(tmp_path):
    """Where config.json says that all heads share it, vLLM takes lm_heads.0.weight for lm_head.weight."""
    held = files.tensors("vllm-single")
    held["lm_heads.0.weight"] = held.pop("lm_head.weight")
    heads = load_heads(files.write(tmp_path, "vllm", held, files.settings("vllm-single")))
    assert heads.config.projection == "single"
    with pytest.raises(CheckpointError, match=r"missing: lm_heads"):
        load_heads(files.write(tmp_path, "vllm", held))


def test_prefixes(tmp_path):
    plain = load_heads(files.write(tmp_path / "a", "vllm"))
    held = {f"medusa_heads.{name}": a for name, a in files.tensors("vllm").items()}
    prefixed = load_heads(files.write(tmp_path / "b", "vllm", held))
    assert prefixed.config == plain.config
    chex.assert_trees_all_equal(plain.params, prefixed.params)


def test_a_layout_is_one_row(tmp_path, monkeypatch):
    """Told apart, read and written by its row alone."""
    row = dataclasses.replace(
        LAYOUTS["vllm"],
        name="other",
        mark=r"guess\.\d+\.out",
        names={
            "blocks.{head}.{block}.kernel": "guess.{head}.layer{block}.w",
            "blocks.{head}.{block}.bias": "guess.{head}.layer{block}.b",
            "projections.{head}": "guess.{head}.out",
            "tokens": "ids",
        },
        settings={"guesses": "num_heads"},
        aliases={},
        constants={"kind": "other"},
    )
    monkeypatch.setitem(LAYOUTS, "other", row)
    monkeypatch.setattr("jaxspec.heads.export.EXPORT_LAYOUTS", ("other",))
    heads = load_heads(files.write(tmp_path / "in", "vllm-reduced"))
    place = export_heads(heads, tmp_path / "out", "other")
    assert json.loads((place / "config.json").read_text()) == {"kind": "other", "guesses": 3}
    assert {"guess.2.layer1.w", "guess.0.out", "ids"} <= load_file(place / "model.safetensors").keys()
    assert find_layout(place) == open_heads(place).layout == "other"
    (place / "config.json").write_text('{"guesses": 4, "vocab_size": 61}')
    with pytest.raises(InvalidConfig, match="give the target"):  # for the row has no key for the vocabulary
        load_heads(place)
    back = load_heads(place, target=MODEL)
    assert back.config == heads.config
    assert back.notes == ("config.json says guesses 4, but the tensors say 3",)
    chex.assert_trees_all_equal(back.params, heads.params)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_files_fetched_from_the_hub(tmp_path, monkeypatch, allow_pickle):
    """Those of heads in any layout; pickles only when they may be read."""
    asked = []
    monkeypatch.setattr(hub, "fetch_repository", lambda name, revision, more: asked.extend(more) or tmp_path)
    with pytest.raises(CheckpointError, match="holds no heads"):
        load_heads("some/heads", allow_pickle=allow_pickle)
    assert asked[:3] == ["heads.json", "heads.safetensors", "medusa_lm_head.safetensors"]
    assert ("medusa_lm_head.pt" in asked) == allow_pickle


# --- our own directory ----------------------------------------------------------------------------------------------

ODD_VALUES = (None, "x", "", -1, 0, 10**30, 1e308, True, False, [], [[1]], {}, {"a": 1}, 2.5, "drop")


def test_every_value_of_our_manifest(tmp_path):
    """Each gives the heads, or an error that names the file; and at once."""
    config = HeadsConfig(64, 61, 2, projection="own", draft_vocab_size=20)
    heads = DraftHeads(config, init_params(config, PROJECTION, np.arange(20)), jaxspec.chain(2))
    place = save_heads(heads, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"already has a heads\.json"):
        save_heads(heads, place)
    good = (place / "heads.json").read_text()
    for path in [(key,) for key in json.loads(good)] + [("config", key) for key in json.loads(good)["config"]]:
        for value in ODD_VALUES:
            changed = json.loads(good)
            inner = changed if len(path) == 1 else changed["config"]
            inner.pop(path[-1]) if value == "drop" else inner.update({path[-1]: value})
            (place / "heads.json").write_text(json.dumps(changed))
            with contextlib.suppress(CheckpointError):
                assert instance(HeadsConfig, open_heads(place).config()).num_heads == 2
    (place / "heads.json").write_text(good)
    assert open_heads(place).tree == jaxspec.chain(2)
    held = load_file(place / "heads.safetensors")
    for what, tensors, word in damaged(held):
        if what == "not a number" and word == "tokens":
            continue
        tensors = {name: np.ascontiguousarray(a, a.dtype if a.dtype != float else "f4") for name, a in tensors.items()}
        save_file(tensors, place / "heads.safetensors")
        with pytest.raises(CheckpointError, match=word.replace(".", r"\.")):
            load_heads(place)
    save_file(held | {"tokens": held["tokens"][::-1].copy()}, place / "heads.safetensors")
    with pytest.raises(CheckpointError, match="tokens must be ascending"):
        load_heads(place)
    (place / "heads.safetensors").rename(tmp_path / "outside")
    (place / "heads.safetensors").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="leads to"):
        load_heads(place)


# --- export -----------------------------------------------------------------------------------------------------------


def test_projections_are_copied_where_a_layout_holds_them(tmp_path):
    config = HeadsConfig(64, 61, 2)
    heads = DraftHeads(config, init_params(config))
    for layout, many in (("v0.1", 2), ("vllm", 1)):
        with pytest.raises(InvalidConfig, match="give the target"):
            export_heads(heads, tmp_path / "no", layout)
        back = load_heads(export_heads(heads, tmp_path / layout, layout, target=MODEL), target=MODEL)
        assert back.config.projection == ("own" if many == 2 else "single")
        assert len(back.params["projections"]) == many
        for one in back.params["projections"].values():
            np.testing.assert_array_equal(one, PROJECTION)
    told = json.loads((tmp_path / "v0.1" / "config.json").read_text())
    assert told["base_model_name_or_path"] == MODEL.name
    assert (told["medusa_num_heads"], told["medusa_num_layers"]) == (2, 1)
    told = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert {name: told[name] for name in files.settings("vllm-single")} == files.settings(
        "vllm-single", num_heads=2, num_hidden_layers=1
    )
    single = load_heads(tmp_path / "vllm")
    assert load_heads(export_heads(single, tmp_path / "each")).config.projection == "own"


def test_recurrent_heads_go_through_files_to_the_bit(tmp_path):
    """They have a layout of ours alone; untrained, they project the target's own feature, whatever they read."""
    config = HeadsConfig(64, 61, 3, 2, inputs="recurrent", draft_vocab_size=20)
    heads = DraftHeads(config, init_params(config, tokens=np.arange(20)))
    found = load_heads(jaxspec.save_heads(heads, tmp_path))
    assert found.config == config
    for name, leaf in flatten(heads.params).items():
        np.testing.assert_array_equal(flatten(found.params)[name], leaf)
    rng = np.random.default_rng(0)
    hidden, *words = (jnp.asarray(rng.normal(size=(2, 5, 64)), jnp.float32) for _ in range(4))
    every = list(make_network(config, found.params).each_feature(hidden, words))
    assert len(every) == 3
    for features in every:
        np.testing.assert_array_equal(features, hidden)


def test_what_a_layout_cannot_say(tmp_path):
    def refused(said, layout="v0.1", error: type[JaxspecError] = InvalidConfig, **changes):
        config = HeadsConfig(64, 61, 2, **changes)
        tokens = np.arange(20) if config.draft_vocab_size else None
        heads = DraftHeads(config, init_params(config, PROJECTION, tokens))
        with pytest.raises(error, match=said):
            export_heads(heads, tmp_path / "out", layout)

    for layout in ("v0.1", "legacy", "vllm"):
        refused("read tokens .*only jaxspec serves them. Heads trained with --inputs hidden", layout, inputs="path")
        refused("read tokens", layout, inputs="recurrent")
    refused("reduced vocabulary; use the layout vllm", draft_vocab_size=20)
    refused("a bias in every block.*use the layout vllm", bias=False)
    refused("shares the target's projection.*use the layout v0.1 or vllm", "legacy", projection="own")
    refused("one block per head, but these heads have 2; use the layout v0.1 or vllm", "legacy", num_layers=2)
    refused("unknown layout 'v2'", "v2", UnknownName)
    assert not (tmp_path / "out").exists()
    config = HeadsConfig(64, 61, 2, bias=False, projection="single", draft_vocab_size=20)
    heads = DraftHeads(config, init_params(config, PROJECTION, np.arange(1, 21)))
    assert load_heads(export_heads(heads, tmp_path / "out", "vllm")).config == config
    with pytest.raises(CheckpointError, match=r"already has a config\.json"):
        export_heads(heads, tmp_path / "out", "vllm")
    other = toys.transformer(hidden_size=32)
    other = jaxspec.Model(other, other.init_params(jax.random.key(0)))
    with pytest.raises(ShapeMismatch, match="features of 64"):
        export_heads(heads, tmp_path / "more", "vllm", target=other)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        export_heads(heads, tmp_path / "file" / "in", "vllm")


# --- a model with its heads, and real shapes -------------------------------------------------------------------------


def test_a_model_that_holds_its_heads(tmp_path):
    """Target and heads of one sharded directory; the heads are said to be that model's."""
    from helpers.checkpoints import random_params, tiny_config, write_hf

    config = tiny_config(vocab_size=61)
    params = random_params(config)
    write_hf(tmp_path / "bare", config, params)
    place = write_hf(tmp_path / "both", config, params, shards=3, tensors=files.tensors("v1.0"))
    target, bare = jaxspec.load(place), jaxspec.load(tmp_path / "bare")
    chex.assert_trees_all_equal(target.params, bare.params)
    heads = load_heads(place, target=target)
    assert heads.notes == (WHOLE_MODEL_NOTE,)
    assert (heads.config.num_heads, heads.config.projection) == (3, "own")


def test_medusa_7b(tmp_path):
    """The real shapes of FasterDecoding/medusa-vicuna-7b-v1.3, in a file with nothing written but its header."""
    import struct

    header, at = {}, 0
    for i in range(5):
        shapes = {"0.linear.weight": [4096, 4096], "0.linear.bias": [4096], "1.weight": [32000, 4096]}
        for name, shape in shapes.items():
            end = at + 2 * int(np.prod(shape))
            header[f"{i}.{name}"] = {"dtype": "F16", "shape": shape, "data_offsets": [at, end]}
            at = end
    raw = json.dumps(header).encode()
    path = tmp_path / "medusa_lm_head.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    found = open_heads(tmp_path)
    assert found.layout == "v0.1"
    assert found.config() == HeadsConfig(4096, 32000, 5, 1, projection="own")
    assert sum(tensor.bytes for tensor in found.stored.values()) == at == 1_478_533_120
    assert found.notes == ("config.json says medusa_num_heads 2, but the tensors say 5",)
