"""Tests that a run goes on with what it was begun with alone: every field of the target, the start and the settings."""

import dataclasses
import json
from typing import Any

import jax
import pytest

import jaxspec
from helpers import toys, trainees
from helpers.trainees import train
from jaxspec.errors import TrainingError
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import init_params
from jaxspec.models.config import DeltaSizes, Experts, ModelConfig
from jaxspec.models.execution import Execution
from jaxspec.models.rope import Rope
from jaxspec.models.transformer import TransformerLM
from jaxspec.registry import TRAINEES, find
from jaxspec.text import ChatTemplate
from jaxspec.train import manifest
from jaxspec.train.identity import TargetIdentity, describe_start
from jaxspec.train.log import LOG_FILE, Watch
from jaxspec.train.settings import TrainSettings, own_fields

LM = toys.transformer(vocab_size=16, num_layers=2)
LM = dataclasses.replace(LM, config=dataclasses.replace(LM.config, window=4, window_rope=Rope(theta=100.0)))
MAY_CHANGE = {"execution"}
"""The field of a network that decides how it is placed and computed, and changes the rounding of sums alone."""
ANOTHER: dict[str, Any] = {
    "num_kv_heads": 1,
    "windowed": (True, False),
    "window_rope": None,
    "activation": "gelu_tanh",
    "query_scale": 0.5,
    "width": 2,
    "divisors": (2.0,) * (LM.config.head_dim // 2),
    "dtype": "bfloat16",
    "layers": 1,
    "known": 9,
    "taps": (1,),
    "execution": Execution(attention="pallas", platform="gpu"),
}
"""Other values of fields whose type alone does not tell one."""


RECURRENT = {"delta": DeltaSizes(1, 1, 8, 8), "recurrent": (True, False)}
SPARSE = {"experts": Experts(4, 2, 8), "sparse": (True, False)}
TOGETHER: dict[str, dict[str, Any]] = {
    "delta": RECURRENT,
    "recurrent": RECURRENT | {"recurrent": (False, True)},
    "experts": SPARSE,
    "sparse": SPARSE | {"sparse": (False, True)},
}
"""Other values of fields that need one another."""


def another(name: str, value: Any) -> Any:
    """Returns another valid value of a field."""
    if name in ANOTHER:
        return ANOTHER[name]
    return not value if isinstance(value, bool) else type(value)(value * 2 + 2)


def changed_fields(value: Any) -> dict[str, Any]:
    """Returns the value with one field changed, by the dotted name of the field."""
    found = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if field.name in TOGETHER:
            found[field.name] = dataclasses.replace(value, **TOGETHER[field.name])
            continue
        if isinstance(inner, ModelConfig | Rope):
            for name, other in changed_fields(inner).items():
                found[f"{field.name}.{name}"] = dataclasses.replace(value, **{field.name: other})
        if not isinstance(inner, ModelConfig | Rope) or field.name in ANOTHER:
            found[field.name] = dataclasses.replace(value, **{field.name: another(field.name, inner)})
    return found


NETWORKS = changed_fields(LM)
SETTINGS = {(name, kind.__name__): kind for kind in (find("kind of heads", name) for name in TRAINEES) for name in
            [field.name for field in own_fields(kind)]}  # fmt: skip
SETTINGS |= {(field.name, "shared"): jaxspec.MedusaSettings for field in dataclasses.fields(TrainSettings)
             if field.name != "start"}  # fmt: skip


def other_setting(kind: Any, name: str) -> Any:
    """Returns settings with one of them at another valid value."""
    field = next(field for field in dataclasses.fields(kind) if field.name == name)
    choices = [choice for choice in field.metadata.get("choices", ()) if choice != field.default]
    if isinstance(field.default, str):
        value = choices[0] if choices else "1,2"
    elif isinstance(field.default, float):
        value = (field.default + 0.9) / 2 if field.default < 1 else field.default * 2
    else:
        value = another("", field.default)
    value = "data=2" if name == "mesh" else value
    with_it = {"batch": value * 8} if name == "accumulate" else {}
    with_it |= {"cache_features": False} if name == "medusa2" else {}
    return valid(kind, **{name: value}, **with_it)


def valid(kind: Any, **changes: Any) -> TrainSettings:
    """Returns settings of a kind, with the draft model that PARD models need."""
    return kind(**({"start": "draft"} if kind.trains_model else {}), **changes)


@pytest.fixture
def begun(tmp_path):
    """A folder in which a step was logged, and a function that compares values with its manifest."""
    (tmp_path / LOG_FILE).write_text('{"step": 1}\n')
    lines: list[str] = []

    def match(about, because=None):
        manifest.match_run(tmp_path, tmp_path, about, because or {}, lines.append)
        return lines

    def write(about, because=None):
        (tmp_path / LOG_FILE).unlink()
        match(about, because)
        (tmp_path / LOG_FILE).write_text('{"step": 1}\n')

    return write, match, tmp_path


def about_of(lm: TransformerLM = LM, settings: TrainSettings | None = None) -> dict:
    identity = TargetIdentity.of(jaxspec.Model(lm, {}, stop_ids=(0,)))
    asked = manifest.run_settings(settings or jaxspec.MedusaSettings())
    return identity.answer_values | asked | describe_start(None)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_field_of_the_network_binds_a_run_or_is_listed_as_free(name, begun):
    write, match, _ = begun
    write(about_of())
    now = about_of(NETWORKS[name])
    if name in MAY_CHANGE:
        assert match(now) == []
        return
    with pytest.raises(
        TrainingError, match=rf"made with .*target_network\.{name}=.*, now .*: use the same values"
    ) as error:
        match(now)
    also = name == "config.vocab_size"  # the ids that stand for tokens are then others, too
    also |= name.removeprefix("config.") in TOGETHER
    assert str(error.value).count("=") == 1 + also, "nothing else is said to differ"


def test_a_later_field_that_is_set_back_to_its_default_is_a_difference(begun):
    """Without a description, it has its default, also in manifests of earlier versions."""
    write, match, _ = begun
    write(about_of(NETWORKS["config.delta"]))
    with pytest.raises(TrainingError, match=r"target_network\.config\.delta=.*, now None"):
        match(about_of())


@pytest.mark.parametrize(("name", "kind"), SETTINGS)
def test_every_setting_binds_a_run_or_is_listed_as_free(name, kind, begun):
    write, match, _ = begun
    of, changed = SETTINGS[name, kind], other_setting(SETTINGS[name, kind], name)
    write(about_of(settings=valid(of)))
    now = about_of(settings=changed)
    if name in manifest.CHANGEABLE_SETTINGS:
        assert match(now) == []
        return
    with pytest.raises(TrainingError, match=rf"made with .*\b{name}=.*, now .*: use the same values"):
        match(now)


def test_there_are_many_fields():
    assert len(NETWORKS) >= 33
    assert len(SETTINGS) >= 60
    assert {"config.rope.theta", "config.norm_eps", "config.window_rope.theta", "dtype", "taps"} <= NETWORKS.keys()
    assert set(manifest.CHANGEABLE_SETTINGS) <= {name for name, _ in SETTINGS}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(HeadsConfig)])
def test_the_sizes_of_heads_to_start_from_bind_a_run(name, begun):
    write, match, _ = begun
    config = HeadsConfig(16, 20, 2, inputs="path", draft_vocab_size=5)
    heads = jaxspec.DraftHeads(config, init_params(config, tokens=jax.numpy.arange(5)))
    value = getattr(config, name)
    other = {"inputs": "hidden", "projection": "own", "bias": not config.bias}.get(name)
    other = value + 1 if other is None else other
    assert other != value
    write(describe_start(heads) | {"answer_temperature": 0.0})
    moved = dataclasses.replace(heads, config=dataclasses.replace(config, **{name: other}))
    with pytest.raises(TrainingError, match=rf"made with start_network\.{name}=.*, now"):
        match(describe_start(moved) | {"answer_temperature": 0.0})


def test_a_tokenizer_and_a_template_are_named_where_the_ids_differ(begun):
    """Another template that writes the same ids changes nothing; one that does not is named beside the texts."""
    write, match, _ = begun
    model = trainees.target()
    before = TargetIdentity.of(model)
    now = TargetIdentity.of(dataclasses.replace(model, chat_template=ChatTemplate("{{ messages[0].content }}")))
    about = about_of()
    write(about | {"texts": "1"}, before.encoding_values)
    assert match(about | {"texts": "1"}, now.encoding_values) == []
    with pytest.raises(TrainingError, match="made with another chat template: use the same values"):
        match(about | {"texts": "2"}, now.encoding_values)
    without = TargetIdentity.of(dataclasses.replace(model, tokenizer=None)).encoding_values
    with pytest.raises(TrainingError, match="made with another tokenizer: use the same values"):
        match(about | {"texts": "2"}, without)


def test_a_run_of_an_earlier_version_goes_on_and_says_what_is_not_compared(begun):
    """Its manifest has no network, and later ones may lack a field that a network has by then."""
    write, match, folder = begun
    about = about_of()
    old = {name: about[name] for name in about if name not in manifest.LATER_LABELS}
    write(old)
    (line,) = match(about)
    assert line == (
        f"{folder / 'settings.json'} is from an earlier version of jaxspec and does not record the sizes and constants "
        "of the target, the stop tokens of the target, the sizes and constants of the start, so they are not compared"
    )
    with pytest.raises(TrainingError, match="steps=1000, now 7"):
        match(about | {"steps": 7})
    fewer = json.loads(json.dumps(about))
    del fewer["target_network"]["config"]["post_norms"]
    write(fewer)
    assert match(about)[-1].endswith("does not record target_network.config.post_norms, so they are not compared")


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """Questions with answers, so that no target has to answer."""
    path = tmp_path_factory.mktemp("prompts") / "answered.jsonl"
    talks = [[("user", word), ("assistant", word * 3)] for word in ("abc", "de", "fgh", "ab", "cd", "efg", "ha", "bee")]
    lines = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def stopped(conversations, tmp_path_factory):
    """The folder of a run that was ended after a step."""
    folder = tmp_path_factory.mktemp("stopped")

    def end(step, *_):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        train(trainees.target(), conversations, folder, Watch(step=end), distill=False, log_every=1)
    return folder


def edited(**changes: Any) -> jaxspec.Model:
    """The target as an edited config.json makes it: the same weights with other constants."""
    model = trainees.target()
    lm = dataclasses.replace(trainees.LM, config=dataclasses.replace(trainees.LM.config, **changes))
    return dataclasses.replace(model, lm=lm)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rope", Rope(theta=500.0)), ("norm_eps", 1e-3), ("activation", "gelu_tanh"), ("embed_scale", 2.0)],
)
def test_the_same_weights_under_another_config_are_another_target(conversations, stopped, tmp_path, name, value):
    """A run is refused, and so are the features of one, where nothing is answered."""
    model = edited(**{name: value})
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    dotted = "rope.theta" if name == "rope" else name
    words = rf"holds a run made with target_network\.config\.{dotted}=.*: use the same values, or another folder"
    with pytest.raises(TrainingError, match=words):
        train(model, conversations, stopped, distill=False, log_every=1)
    words = rf"features holds features made with target_network\.config\.{dotted}=.*: use the same values, or"
    with pytest.raises(TrainingError, match=words):
        train(model, conversations, tmp_path, data=stopped, distill=False, log_every=1)
    assert before == {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}


def test_other_stop_tokens_are_another_target_for_answers(tmp_path):
    prompts = trainees.write_prompts(tmp_path / "prompts.jsonl", 8)

    def reached(what, *_):
        if what == "the target answers":
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(trainees.target(), prompts, tmp_path / "run", Watch(phase=reached), data=tmp_path)
    model = dataclasses.replace(trainees.target(), stop_ids=(5,))
    with pytest.raises(TrainingError, match=r"holds answers made with stop_ids=\[0\], now \[5\]: use the same values"):
        train(model, prompts, tmp_path / "run", data=tmp_path)
