"""The programs that test_mesh.py runs on simulated devices."""

import dataclasses
import pathlib
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from cases import random_dflash, random_eagle
from helpers.narrow import instance, not_none
from helpers.toys import lively, noisy, transformer
from jaxspec.core.automaton import TokenAutomaton
from jaxspec.decode import session as sessions
from jaxspec.decode.loop import Decoder
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import DraftHeads, init_params
from jaxspec.kernels.library import kernels_available
from jaxspec.models.kernels import with_kernels
from jaxspec.models.quantized import quantize
from jaxspec.models.sharding import param_shardings
from jaxspec.models.transformer import TransformerLM
from jaxspec.text import Tokenizer

LM = transformer(num_heads=8, num_kv_heads=8, vocab_size=64)
PARAMS = lively(LM.init_params(jax.random.key(0)))
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 64, RNG.integers(1, 30)).tolist() for _ in range(11)]
KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
OPTIONS = {
    "key": jax.random.key(1),
    "sampling": jaxspec.Sampling(temperature=[0.0, 0.7] * 5 + [1.2]),
    "drafter": "model",
    "draft": jaxspec.Model(LM, noisy(PARAMS, 1, 0.1)),
    "tree": jaxspec.branching(2, 1),
    "stop_ids": [6, 20, 58],
    "max_new_tokens": 24,
}


def letters(first: int) -> Tokenizer:
    """A letter for every token, from some letter on."""
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [chr(ord("0") + (first + c) % 64) for c in range(64)],
            "tokenizer.ggml.token_type": [1] * 64,
            "tokenizer.ggml.merges": [],
        }
    )


LETTERS = letters(0)


def texts(target, **more) -> tuple[list[list[int]], int]:
    out = jaxspec.generate(target, PROMPTS, **OPTIONS | more)
    return [row.tokens for row in out], out.stats.accepted


def collectives(program: str) -> list[list[list[int]]]:
    """The groups of devices of every collective of a compiled program."""
    found = []
    for line in program.splitlines():
        if not re.search(rf"= .*\b({KINDS})(-start)?\(", line):
            continue
        groups = re.search(r"replica_groups=(\{\{[\d,{}]*\}\}|\[[^ ]*|mesh\[[^]]*\] \{[^}]*\})", line)
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}?,", line)
        assert groups or pairs, line
        if pairs:
            found.append([[int(n) for n in pair.split(",")] for pair in re.findall(r"\{?(\d+,\d+)\}?", pairs[0])])
            continue
        text = not_none(groups)[1]
        if text.startswith("{"):
            found.append([[int(n) for n in some.split(",")] for some in re.findall(r"\{([\d,]+)\}", text)])
        else:
            found.append(_of_axes(text) if text.startswith("mesh") else _iota(text))
    return found


def _of_axes(text: str) -> list[list[int]]:
    """`mesh['axis_0'=4,'axis_1'=2] {'axis_1'}`."""
    axes, over = not_none(re.fullmatch(r"mesh\[(.*)\] \{(.*)\}", text)).groups()
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    over = [part.strip("'") for part in over.split(",")]
    assert set(over) <= sizes.keys(), text
    assert len(sizes) == axes.count("="), text
    order = [name for name in sizes if name not in over] + [name for name in sizes if name in over]
    ids = np.arange(int(np.prod(list(sizes.values())))).reshape(list(sizes.values()))
    ids = ids.transpose([list(sizes).index(name) for name in order])
    return ids.reshape(-1, int(np.prod([sizes[name] for name in over]))).tolist()


def _iota(text: str) -> list[list[int]]:
    """`[2,4]<=[8]` or `[4,2]<=[2,4]T(1,0)`."""
    shape, dims, turned = not_none(re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)).groups()
    ids = np.arange(np.prod([int(n) for n in dims.split(",")])).reshape([int(n) for n in dims.split(",")])
    if turned:
        ids = ids.transpose([int(n) for n in turned.split(",")])
    return ids.reshape([int(n) for n in shape.split(",")]).tolist()


def loaded(target) -> dict:
    """What was saved, read straight onto a mesh, beside what is laid there from one device."""
    mesh = jaxspec.make_mesh(2, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = jaxspec.save(target, pathlib.Path(folder) / "model")
        read = jaxspec.load(path, mesh=mesh)
    one, other = jaxspec.shard(target, mesh), jaxspec.shard(read, mesh)
    pairs = list(zip(jax.tree.leaves(one.params), jax.tree.leaves(read.params), strict=True))
    arrays = [read.params["layers"][0][name] for name in ("qkv", "down")]
    return {
        "same": all(a.sharding == b.sharding and (np.asarray(a) == np.asarray(b)).all() for a, b in pairs),
        "whole": all(a is b for a, b in zip(jax.tree.leaves(read.params), jax.tree.leaves(other.params))),
        "lm": read.lm == one.lm,
        "shares": [max(s.data.nbytes for s in a.addressable_shards) / a.nbytes for a in arrays],
    }


def others(names) -> dict[str, list]:
    """Heads, the target's own layers, another vocabulary, a rule with noise of its own: of one device, and of 2 x 4."""
    target = jaxspec.Model(LM, PARAMS, tokenizer=LETTERS)
    config = HeadsConfig(LM.config.hidden_size, 64, 2, inputs="path")
    heads = DraftHeads(config, init_params(config, instance(jax.Array, LM.unembedding(PARAMS))))
    turned = {
        name: jnp.roll(a, -9, 0) if name in ("embed", "head") else a for name, a in OPTIONS["draft"].params.items()
    }
    plain = {"drafter": "none", "draft": None, "tree": None}
    # Every third token is free, and forces the two after it.
    table = np.full((3, 64), -1)
    table[0], table[1, 7], table[2, 9] = 1, 2, 0
    automaton = TokenAutomaton(table, [True, False, False], np.arange(64))
    grammar = dataclasses.replace(OPTIONS["sampling"], processors=[jaxspec.Grammar(automaton)])
    ways = {
        "medusa": plain | {"drafter": "medusa", "heads": heads, "tree": jaxspec.branching(2, 1)},
        "eagle": plain | {"drafter": "eagle", "heads": random_eagle(target), "tree": jaxspec.dynamic(12, 2, 25)},
        "dflash": plain | {"drafter": "dflash", "heads": random_dflash(target), "tree": jaxspec.dynamic(12, 2, 25)},
        "early-exit": plain | {"drafter": "early-exit", "drafter_options": {"exit_layers": 1}, "tree": 2},
        "another vocabulary": {"draft": jaxspec.Model(LM, turned, letters(9))},
        "rejection": {"rule": "rejection"},
        "grammar": plain | {"drafter": "prompt-lookup", "sampling": grammar},
        "grammar without a draft": plain | {"sampling": grammar},
    }
    mesh = jaxspec.make_mesh(2, 4)
    return {name: [texts(target, **ways[name], mesh=where) for where in (None, mesh)] for name in names}


def stop_strings(rows) -> list[list]:
    """What one device and 2 x 4 write where pieces of these texts end a text."""
    target = jaxspec.Model(LM, PARAMS, tokenizer=LETTERS)
    stop = [LETTERS.decode(row[3:5]) for row in rows if len(row) > 5]
    meshes = (None, jaxspec.make_mesh(2, 4))
    outs = [jaxspec.generate(target, PROMPTS, **OPTIONS, stop=stop, mesh=mesh) for mesh in meshes]
    return [[(row.tokens, row.text, row.finish_reason) for row in out] for out in outs]


def precompiled(target) -> list:
    """The seconds that compiling beforehand takes, and those that are left for the call."""
    sessions.clear_executables()
    mesh = jaxspec.make_mesh(2, 4)
    compiled = jaxspec.precompile(target, PROMPTS, **OPTIONS, mesh=mesh)
    return [compiled, jaxspec.generate(target, PROMPTS, **OPTIONS, mesh=mesh).timing.compile_s]


def on_eight() -> dict:
    """Texts of one device and of eight, and a checkpoint and rounded weights in shards."""
    target = jaxspec.Model(LM, PARAMS)
    found = on_meshes([(2, 4)])
    found["loaded"] = loaded(target)
    held = jaxspec.shard(jaxspec.Model(LM, quantize(PARAMS)), jaxspec.make_mesh(2, 4)).params["layers"][0]
    arrays = [held["qkv"].values, held["qkv"].scale, held["down"].values]
    found["int8 shares"] = [max(s.data.nbytes for s in a.addressable_shards) / a.nbytes for a in arrays]
    try:
        jaxspec.shard(target, jaxspec.make_mesh(2, 3))
    except jaxspec.JaxspecError as error:
        found["refused"] = str(error)
    return found


def more_on_eight(ways) -> dict:
    """For the slow tests: other meshes, the kernels, drafters, stop strings, compiling beforehand, rounded weights."""
    found = on_meshes([(8, 1), (4, 2), (1, 8)])
    found["kernels"] = kernels(jaxspec.Model(LM, PARAMS))
    found["others"] = others(ways)
    found["stop"] = stop_strings(found["one"])
    found["precompile"] = precompiled(jaxspec.Model(LM, PARAMS))
    rounded = jaxspec.Model(LM, quantize(PARAMS))
    plain = OPTIONS | {"drafter": "none", "draft": None, "tree": None}
    found["int8"] = [
        [row.tokens for row in jaxspec.generate(rounded, PROMPTS, **plain, mesh=mesh)]
        for mesh in (None, jaxspec.make_mesh(2, 4))
    ]
    return found


def kernels(target) -> list | None:
    """Tokens and log-probabilities of one device and of eight that share no layer; None without kernels."""
    if not kernels_available():
        return None
    packed, mesh = with_kernels(target), jaxspec.make_mesh(8, 1)
    drafting = {"drafter": "early-exit", "draft": None, "drafter_options": {"exit_layers": 1}, "tree": 3}
    options: dict[str, Any] = {**OPTIONS, **drafting, "logprobs": True}
    outs = [jaxspec.generate(packed, PROMPTS, **options, mesh=where) for where in (None, mesh)]
    assert instance(TransformerLM, jaxspec.shard(packed, mesh).lm).execution.kernels
    assert not instance(TransformerLM, jaxspec.shard(packed, jaxspec.make_mesh(2, 4)).lm).execution.kernels
    return [[(row.tokens, row.logprobs) for row in out] for out in outs]


def on_meshes(shapes) -> dict:
    """Texts of one device, and of each mesh (data, model) of eight; and who exchanges anything with whom."""
    target = jaxspec.Model(LM, PARAMS)
    found: dict = {"one": texts(target)[0]}
    for data, model in shapes:
        sessions.clear_executables()
        mesh = jaxspec.make_mesh(data, model)
        split = jax.tree.leaves(param_shardings(PARAMS, mesh))
        assert any(sharding.spec != jax.P() for sharding in split) == (model > 1)
        tokens, accepted = texts(target, mesh=mesh)
        runs = [compiled for key, compiled in sessions._EXECUTABLES.items() if key[0] is Decoder.run]
        programs = [not_none(compiled.as_text()) for compiled in runs]
        groups = [one for program in programs for one in collectives(program)]
        assert len(programs) == 1
        found[f"{data}x{model}"] = {"tokens": tokens, "accepted": accepted, "groups": groups}
    return found


def on_two() -> dict:
    """Texts on a mesh of all devices of both processes, of rows that take turns."""
    target = jaxspec.Model(LM, PARAMS)
    return {"devices": jax.device_count(), "tokens": texts(target, mesh=jaxspec.make_mesh(4, 2), batch=4)[0]}
