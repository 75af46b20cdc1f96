"""Tests a user's own network: decoding with drafts, training heads for it, and errors that name what is missing."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import trainees
from helpers.narrow import instance
from helpers.tiers import with_slow
from helpers.trainees import train
from jaxspec.core.networks import HeadTarget
from jaxspec.errors import InvalidConfig, MissingTokenizer, ShapeMismatch
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.text.conversations import Conversation, read_conversations
from jaxspec.train import tokenized
from jaxspec.train.log import Watch
from jaxspec.train.medusa import MedusaTrainee

VOCAB, WIDTH = 31, 16


@dataclasses.dataclass(frozen=True)
class Network:
    """One layer of attention on embeddings, without a line of this library's transformer."""

    vocab: int = VOCAB
    context: int = 256

    def init_cache(self, batch, capacity):
        return jaxspec.empty_cache(1, batch, 1, capacity, WIDTH, jnp.float32)

    def apply(self, params, window, cache, past=None):
        x = params["embed"][window.tokens] + params["places"][window.positions]
        new = jaxspec.KV(x[None, :, None], (x @ params["values"])[None, :, None])
        seen = new if past is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b], 3), past, new)
        keys, values = (a[0] for a in seen)
        mixed = jaxspec.attend(
            x[:, None, None], cache.stores, 0, cache.length, (keys, values), window.mask, window.paths, WIDTH**-0.5
        )
        return x + mixed[:, 0, 0], new

    commit = staticmethod(jaxspec.append_to_cache)

    def head(self, params, features):
        return features @ params["out"].T

    def embedding(self, params):
        return params["embed"]

    def unembedding(self, params):
        return params["out"]


def params(seed: int = 0) -> dict:
    shapes = {"embed": (VOCAB, WIDTH), "out": (VOCAB, WIDTH), "places": (256, WIDTH), "values": (WIDTH, WIDTH)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    tables = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items())}
    return tables | {"places": 0.1 * tables["places"], "values": 0.1 * tables["values"]}


TARGET = jaxspec.Model(Network(), params(), name="own")


def without(*names) -> Any:
    """The network without some methods."""
    kept = {name: value for name, value in vars(Network).items() if name not in names and not name.startswith("__")}
    return type("Lacking", (), kept)()


def prompts(path, count: int = 24, rows=None):
    rng = np.random.default_rng(0)
    rows = rows or [{"prompt": rng.integers(0, VOCAB, rng.integers(2, 9)).tolist()} for _ in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_both_protocols_are_met():
    assert isinstance(Network(), jaxspec.LanguageModel)
    assert isinstance(Network(), HeadTarget)
    assert isinstance(trainees.LM, HeadTarget)
    assert not isinstance(without("embedding"), HeadTarget)


@pytest.mark.parametrize("tree", with_slow([jaxspec.chain(3), jaxspec.branching(2, 2)], (jaxspec.chain(3),)))
def test_its_text_is_that_of_plain_decoding(tree):
    common = {"key": jax.random.key(1), "sampling": jaxspec.Sampling(temperature=0.8), "max_new_tokens": 16}
    draft = jaxspec.Model(Network(), jax.tree.map(lambda a: a * 1.1, TARGET.params))
    plain = jaxspec.generate(TARGET, [[1, 2, 3], [4]], drafter="none", **common)
    drafted = jaxspec.generate(TARGET, [[1, 2, 3], [4]], drafter="model", draft=draft, tree=tree, **common)
    assert [row.tokens for row in drafted] == [row.tokens for row in plain]
    assert drafted.stats.tokens_per_round > 1.2


@pytest.mark.slow
@pytest.mark.parametrize(("inputs", "draft_vocab"), [("hidden", 0), ("recurrent", 12)])
def test_heads_are_trained_for_it_from_token_ids_and_draft(tmp_path, monkeypatch, inputs, draft_vocab):
    """Without a tokenizer, in a relative folder; heads that read no token need no embedding."""
    monkeypatch.chdir(tmp_path)
    target = TARGET if inputs != "hidden" else jaxspec.Model(without("embedding"), TARGET.params)
    changes = {"inputs": inputs, "draft_vocab": draft_vocab, "steps": 30, "learning_rate": 1e-2}
    lines: list[str] = []
    trained = train(target, [prompts(tmp_path / "ids.jsonl")], "run", Watch(say=lines.append), **changes)
    assert lines[0].startswith("Only jaxspec serves" if inputs == "recurrent" else "jaxspec serves these heads, and")
    asked = trained.data.prompts[:3]
    plain = jaxspec.generate(target, asked, drafter="none", max_new_tokens=16)
    drafted = jaxspec.generate(target, asked, drafter="medusa", heads=trained.heads, max_new_tokens=16)
    assert [row.tokens for row in drafted] == [row.tokens for row in plain]
    assert drafted.stats.tokens_per_round > 1.2
    held = [record["held_out"]["accepted_length"] for record in trained.log if "held_out" in record]
    assert held[-1] > held[0]
    kept = jaxspec.load_heads(jaxspec.save_heads(trained.heads, "heads"), target=target)
    assert kept.config == trained.heads.config


def test_given_answers_may_be_token_ids(tmp_path):
    path = tmp_path / "ids.jsonl"
    wrong = [{"prompt": [1.5]}, {"prompt": [-1]}, {"prompt": [True]}, {"prompt": []}, {"prompt": [1], "answer": "text"}]
    prompts(path, rows=[{"prompt": [1, 2], "answer": [3, 4]}, {"prompt": [VOCAB]}, *wrong])
    found, bad = read_conversations([path])
    assert [row.where for row in bad] == [f"{path}:{line}" for line in range(3, 8)]
    assert all("token ids" in row.why or "is empty" in row.why for row in bad)
    (text,), beyond = tokenized.encode_texts(TARGET, found)
    assert (text.ids.tolist(), text.mask.tolist()) == ([1, 2, 3, 4], [False, False, True, True])
    assert [row.why for row in beyond] == ["token id 31 is not in the vocabulary, whose ids go from 0 to 30"]
    assert tokenized.encode_training_prompts(TARGET, found, 8)[0] == [[1, 2]]


@pytest.mark.parametrize("name", ["vocab", "context", "init_cache", "apply", "head"])
def test_a_network_without_a_method_is_refused_by_its_name(name):
    with pytest.raises(InvalidConfig, match=f"needs '{name}', which Lacking does not have; see docs/own-model.md"):
        jaxspec.Model(without(name), {})


def test_a_network_that_holds_arrays_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Holding(Network):
        table: object = None

    with pytest.raises(InvalidConfig, match=r"must be hashable, .*Holding is not .*pass the arrays as params"):
        jaxspec.Model(Holding(table=np.zeros(3)), {})


def refused(error, match, lm, folder, values=None, **settings):
    with pytest.raises(error, match=match) as caught:
        train(
            jaxspec.Model(lm, values or TARGET.params), [prompts(folder / "p.jsonl")], folder / "run",
            **settings,
        )  # fmt: skip
    assert "\n" not in str(caught.value)
    assert not (folder / "run").exists()


def test_what_training_needs_and_does_not_get_is_named_first(tmp_path):
    """Before the target answers or a folder is made."""
    refused(InvalidConfig, "with a method 'unembedding', which Lacking", without("unembedding"), tmp_path)
    refused(InvalidConfig, "inputs 'path' .* a method 'embedding', which Lacking", without("embedding"), tmp_path)
    function = jaxspec.FunctionLM(lambda p, t, n: jnp.zeros((t.shape[0], VOCAB)), VOCAB)
    refused(InvalidConfig, "a method 'unembedding', which FunctionLM does not have", function, tmp_path)

    class Turned(Network):
        def unembedding(self, params):
            return params["out"].T

    refused(
        ShapeMismatch,
        r"Turned.unembedding\(params\) must have the shape \[31, 16\].*\[16, 31\]",
        Turned(),
        tmp_path,
    )

    class Biased(Network):
        def head(self, params, features):
            return super().head(params, features) + params["bias"]

    values = TARGET.params | {"bias": jnp.linspace(0, 3, VOCAB)}
    refused(
        InvalidConfig,
        r"Biased.head must return the features times .* Write a bias as a column",
        Biased(),
        tmp_path,
        values,
    )
    unbiased = jaxspec.Model(Biased(), values | {"bias": jnp.zeros(VOCAB)})
    trained = instance(MedusaTrainee, jaxspec.MedusaSettings(heads=3).trainee(unbiased))
    assert trained.config == HeadsConfig(WIDTH, VOCAB, 3, inputs="path")


def test_text_without_a_tokenizer_is_refused_with_what_to_give(tmp_path):
    path = trainees.write_prompts(tmp_path / "text.jsonl")
    with pytest.raises(MissingTokenizer, match=r"text.jsonl:1: is text, but own has no tokenizer; use token ids"):
        train(TARGET, [path], tmp_path / "run")


def test_a_single_question_needs_no_chat_template():
    """A model without one reads it as `generate` does; a conversation needs to be told how it is written."""
    target = jaxspec.Model(trainees.LM, {}, trainees.TOKENIZER, name="base")
    asked = {"role": "user", "content": "abc"}
    assert tokenized.encode_training_prompts(target, [Conversation((asked,), None, "1")], 8)[0] == [
        target.encode("abc")
    ]
    with pytest.raises(MissingTokenizer, match="base has no chat template"):
        tokenized.encode_training_prompts(
            target, [Conversation(({"role": "system", "content": "x"}, asked), None, "1")], 8
        )
