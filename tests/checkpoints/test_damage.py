"""Damaged files of every format: each gives something usable, or one line that names it, at once and in little memory.

The damage is drawn from a seed (`--seed`), some mutants of every format here and ten times as many with `make slow`.
"""

import contextlib
import json
import pathlib
import random
import shutil
import string
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import medusa_files, toys
from helpers.checkpoints import random_params, tiny_config, write_bytes, write_gguf, write_hf
from helpers.families import write_checkpoint
from helpers.mutator import ODD, mutate_bytes, mutate_file
from helpers.narrow import instance
from helpers.paths import GOLDEN_DIR
from jaxspec.bench import tasks
from jaxspec.checkpoints import hub
from jaxspec.core.records import Window
from jaxspec.core.schedule import Schedule
from jaxspec.core.topology import Topology, branching
from jaxspec.errors import FetchError, JaxspecError
from jaxspec.generation.drafting import Drafting
from jaxspec.heads.files import load_heads, save_heads
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import DraftHeads, init_params
from jaxspec.models.transformer import TransformerLM
from jaxspec.schedules.adaptive import Adaptive

pytestmark = pytest.mark.quick

CONFIG = tiny_config(vocab_size=264)
PARAMS = random_params(CONFIG)
LM = toys.transformer(num_layers=1)
TARGET = jaxspec.Model(LM, LM.init_params(jax.random.key(0)))
SECONDS, MEGABYTES, HEAD = 30, 256, 1 << 12
"""What reading a mutant may take of the processor and of memory; the first bytes of a file, which are damaged most."""
LETTERS = string.ascii_letters + string.digits + "._-/"
CHAT = "{% for m in messages %}{{ bos_token }}{{ m['content'] }}{% endfor %}"


# --- what is made -----------------------------------------------------------------------------------------------


def make_hf(place: pathlib.Path) -> pathlib.Path:
    """A sharded Hugging Face directory with every file that is read."""
    write_bytes(place, CONFIG, PARAMS)
    text = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "model_max_length": 10**30}
    files = {
        "generation_config.json": {"eos_token_id": [1, 2], "bos_token_id": 1},
        "tokenizer_config.json": text,
        "special_tokens_map.json": {"bos_token": "<s>"},
        "chat_template.jinja": CHAT,
    }
    (place / "model.safetensors").unlink()
    return write_hf(place, CONFIG, PARAMS, shards=2, files=files)


def make_gguf(place: pathlib.Path, **metadata) -> pathlib.Path:
    place.mkdir()
    text = {"tokenizer.chat_template": CHAT, "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (CONFIG.vocab_size - 3)]}
    return write_gguf(place / "model.gguf", CONFIG, PARAMS, metadata=text | metadata)


def make_gguf_bytes(place: pathlib.Path) -> pathlib.Path:
    tokens = [f"t{i}" for i in range(CONFIG.vocab_size - 3)]
    text = {"tokenizer.ggml.tokens": ["a", "b", "ab", *tokens], "tokenizer.ggml.merges": ["a b"]}
    return make_gguf(place, **text, **{"tokenizer.ggml.pre": "gpt-2"})


def make_gguf_pieces(place: pathlib.Path) -> pathlib.Path:
    return make_gguf(place, **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * CONFIG.vocab_size})


def make_saved(place: pathlib.Path) -> pathlib.Path:
    return jaxspec.save(jaxspec.load(make_hf(place.with_name("source"))), place)


def make_heads(place: pathlib.Path) -> pathlib.Path:
    config = HeadsConfig(64, 61, 2, 1, projection="own", draft_vocab_size=20)
    params = init_params(config, jnp.ones((61, 64)), jnp.arange(0, 60, 3))
    return save_heads(DraftHeads(config, params, branching(2, 2)), place)


def make_torch(place: pathlib.Path) -> pathlib.Path:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(medusa_files.settings("v0.1")))
    medusa_files.write_torch(place / "medusa_lm_head.pt", medusa_files.tensors("v0.1"))
    return place


def make_tuned(place: pathlib.Path) -> pathlib.Path:
    place.mkdir()
    Drafting("medusa", tree=branching(2, 1), schedule=Adaptive((1.0, 1.5, 2.0)), measured={"a": [1.5]}).save(
        place / "t.json"
    )
    return place / "t.json"


def make_task(place: pathlib.Path) -> pathlib.Path:
    place.mkdir()
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"prompt": "one"},
        {"prompt": "é"},
    ]
    (place / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return place / "t.jsonl"


def make_family(case: str):
    golden = json.loads((GOLDEN_DIR / "families.json").read_text())["cases"][case]

    def make(place: pathlib.Path) -> pathlib.Path:
        write_checkpoint(place, case, golden["settings"], golden["shapes"])
        return place

    return make


# --- how it is used ---------------------------------------------------------------------------------------------


def use_model(path: pathlib.Path) -> object:
    """Loads a model, and traces a decoder of it unless it is one that was traced before."""
    model = jaxspec.load(path)
    config = instance(TransformerLM, model.lm).config
    if model.tokenizer is not None:
        ids = model.encode("ab 12")
        assert isinstance(model.decode([i for i in ids if i < config.vocab_size]), str)
    if model.chat_template is not None and model.tokenizer is not None:
        model.encode_chat([{"role": "user", "content": "hello"}])
    assert all(type(i) is int and 0 <= i < config.vocab_size for i in model.stop_ids)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(model.params))
    traced(model.lm, model.params)
    return model


SEEN: set = set()


def traced(lm, params) -> None:
    """The network's static part is hashable, and a call of it can be traced."""
    if lm in SEEN:
        return
    SEEN.add(lm)

    def read(params):
        window = Window(jnp.zeros((1, 4), int), jnp.arange(4)[None], jnp.tri(4, dtype=bool)[None])
        features, _ = lm.apply(params, window, lm.init_cache(1, 4))
        return lm.head(params, features)

    assert jax.eval_shape(read, params).shape == (1, 4, lm.vocab)


def use_heads(path: pathlib.Path) -> object:
    heads = load_heads(path, target=TARGET, allow_pickle=True)
    hash((heads.config, heads.tree))
    if heads.tree is not None:
        assert heads.tree.tree.children.shape[0] == heads.tree.shape.nodes
    return heads


def use_tuned(path: pathlib.Path) -> object:
    tuned = Drafting.load(path)
    hash((tuned.tree, tuned.schedule))
    schedule, tree = instance(Schedule, tuned.schedule), instance(Topology, tuned.tree)
    jax.eval_shape(lambda: schedule.init(1, tree.shape))
    return tuned


def use_task(path: pathlib.Path) -> object:
    task = tasks.load_task(path)
    for question in task.questions:
        f"{question.id} {question.category} {question.turns}".encode()
    return task


# --- the property -----------------------------------------------------------------------------------------------

FORMATS = {
    "config.json": (make_hf, "config.json", use_model),
    "config.json of Qwen2": (make_family("qwen2-half-window"), "config.json", use_model),
    "config.json of Gemma 3": (make_family("gemma3"), "config.json", use_model),
    "config.json of Phi-3": (make_family("phi3-longrope-short"), "config.json", use_model),
    "shards": (make_hf, "*.safetensors", use_model),
    "index": (make_hf, "model.safetensors.index.json", use_model),
    "tokenizer.json": (make_hf, "tokenizer.json", use_model),
    "tokenizer_config.json": (make_hf, "tokenizer_config.json", use_model),
    "generation_config.json": (make_hf, "generation_config.json", use_model),
    "chat template": (make_hf, "chat_template.jinja", use_model),
    "GGUF, byte-level": (make_gguf_bytes, "model.gguf", use_model),
    "GGUF, SentencePiece": (make_gguf_pieces, "model.gguf", use_model),
    "saved manifest": (make_saved, "jaxspec.json", use_model),
    "saved parameters": (make_saved, "params/**/*", use_model),
    "heads.json": (make_heads, "heads.json", use_heads),
    "heads.safetensors": (make_heads, "heads.safetensors", use_heads),
    **{
        f"heads of {layout}": (lambda place, layout=layout: medusa_files.write(place, layout), "*", use_heads)
        for layout in ("v0.1", "legacy", "v1.0", "vllm", "vllm-single", "vllm-reduced")
    },
    "heads of torch": (make_torch, "*", use_heads),
    "tuned": (make_tuned, "t.json", use_tuned),
    "tasks": (make_task, "t.jsonl", use_task),
}


def memory(key: str) -> int:
    """Megabytes of this process, by the kernel: what runs and what is allocated outside of Python is counted, too."""
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(key))
    return 0


def survives(use, path: pathlib.Path, what: str) -> bool:
    """Whether it is usable; if not, the error is a line that names the file. Neither takes long or much memory."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before, start, begun = memory("VmRSS"), time.process_time(), time.monotonic()
    try:
        use(path)
        fine = True
    except JaxspecError as error:
        fine, said = False, str(error)
        assert said.isprintable(), (what, said)
        assert 10 < len(said) < 2000, (what, said)
        assert path.parent.name in said or path.name in said, (what, said)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error!s:.200}") from error
    assert time.process_time() - start < SECONDS, what
    assert time.monotonic() - begun < 4 * SECONDS, what  # nor does it wait for anything
    assert memory("VmHWM") - before < MEGABYTES, what
    return fine


def damage(name: str, folder: pathlib.Path, seed: int, count: int) -> list[bool]:
    """Which of `count` mutants of a format were usable."""
    make, pattern, use = FORMATS[name]
    good, path = folder / "good", folder / "mutant"
    inner = make(good).relative_to(good)
    shutil.copytree(good, path)
    assert survives(use, path / inner, f"{name}, whole")
    files = sorted(file.relative_to(good) for file in good.glob(pattern) if file.is_file())
    found = []
    for i in range(count):
        rng = random.Random(f"{name} {seed} {i}")
        file = rng.choice(files)
        mutate_file(path / file, rng, HEAD)
        found.append(survives(use, path / inner, f"mutant {i} of {name}, {file}"))
        shutil.copyfile(good / file, path / file)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_usable_or_refused_in_a_line(name, tmp_path, seed):
    assert not all(damage(name, tmp_path, seed, 30))


def test_damaged_names_are_refused_in_a_line(seed, monkeypatch):
    """Of presets and repositories; what looks like a repository is asked for, and nothing else is."""
    asked = []

    def refuse(repository, revision=None, **_):
        asked.append((repository, revision))
        raise FetchError(f"{repository}: refused")

    monkeypatch.setattr(hub, "fetch_repository", refuse)
    names = ["smollm2-360m-instruct", "HuggingFaceTB/SmolLM2-135M", "a/b@main", "./model.gguf", "~/model"]
    for i in range(300):
        rng = random.Random(f"names {seed} {i}")
        raw = mutate_bytes(rng.choice(names).encode(), rng)
        name = raw.decode("utf-8", rng.choice(("replace", "surrogateescape", "ignore")))
        for read in (jaxspec.load, load_heads):
            with pytest.raises(JaxspecError) as caught:
                read(rng.choice((name, *ODD)) if i % 3 == 0 else name)
            assert str(caught.value).isprintable(), name
    assert len(asked) > 20
    assert all(set(repository) <= set(LETTERS) and (revision or "x").isascii() for repository, revision in asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_damaged_files_are_usable_or_refused_in_a_line(name, tmp_path, seed):
    assert not all(damage(name, tmp_path, seed + 1, 300))
