"""Damaged and hostile tokenizers: each is a function of its input or a typed error of one line, in bounded time."""

import json
import subprocess
import sys
import time
import warnings

import pytest

from helpers import hostile_tokenizers as hostile
from helpers.bounds import bounded
from jaxspec.confined.process import CONFINED
from jaxspec.errors import CheckpointError, JaxspecError
from jaxspec.text import Tokenizer

pytestmark = pytest.mark.quick

LONGEST_MESSAGE = 700


def use(path) -> list | str:
    """The ids of some texts, or the message of a typed error."""
    try:
        tokenizer = Tokenizer.from_json(path)
        ids = [tokenizer.encode(text) for text in hostile.TEXTS]
        assert ids == tokenizer.encode_all(hostile.TEXTS)
        for some in ids:
            tokenizer.decode([i for i in some if i < tokenizer.vocab_size])
        return ids
    except JaxspecError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < LONGEST_MESSAGE, message
        return message


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize(("name", "count"), [("normalizer", 250), ("pre_tokenizer", 250), ("post_processor", 250)])
def test_steps(path, name, count):
    check_family(path, name, count)


@pytest.mark.parametrize(("name", "count"), [("decoder", 250), ("model", 250)])
def test_decoders_and_models(path, name, count):
    check_family(path, name, count)


def check_family(path, name: str, count: int) -> None:
    """All members of a family, and those that load a second time in another process."""
    results = []
    cases = list(hostile.family(name))
    assert len(cases) > count
    for case in cases:
        hostile.write(path, case)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(use(path))
    loaded = [i for i, result in enumerate(results) if not isinstance(result, str)]
    assert 0 < len(loaded) < len(cases)
    CONFINED.close()
    for i in loaded:
        hostile.write(path, cases[i])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert use(path) == results[i], cases[i][name]


BOMBS = hostile.bombs()


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(path, name, capfd):
    hostile.write(path, BOMBS[name])
    start = time.monotonic()
    with bounded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = use(path)
        assert use(path) == first
    assert time.monotonic() - start < 60  # of a busy machine; the child's processor time is limited
    assert capfd.readouterr() == ("", "")


REFUSED = {
    "doubling": "memory",
    "special tokens without end": "post_processor has more than 10000 parts",
    "empty charsmap": "not a valid tokenizer.json: .*charsmap|tokenizers library fails",
    "prefix longer than tokens": "not a valid tokenizer.json",
    "parts of length 0": "cannot encode",
    "unknown special token": "not a valid tokenizer.json|cannot encode",
    "split at (a+)+$": "cannot encode|processor time",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_message_says(path, name):
    hostile.write(path, BOMBS[name])
    with pytest.raises(CheckpointError, match=REFUSED[name]):
        Tokenizer.from_json(path).encode("a" * 64 + "b")


def test_dropout_is_turned_off_and_said_once(path):
    hostile.write(path, BOMBS["dropout"])
    with pytest.warns(UserWarning, match=r"enables dropout.*turned off") as caught:
        ids = {tuple(one) for one in Tokenizer.from_json(path).encode_all(["aababaab" * 20] * 8)}
    assert len(ids) == len(caught) == 1
    hostile.write(path, hostile.content())
    assert ids == {tuple(Tokenizer.from_json(path).encode("aababaab" * 20))}
    # Both spellings of a key: the library takes the one, JSON's readers in Python the other.
    text, loaded = json.dumps(hostile.content(model=hostile.BPE | {"dropout": 0.5})), 0
    for twice in (text.replace('"dropout": 0.5', '"dropout": 0.5, "dropout": null'), text):
        path.write_text(twice)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tokenizer = Tokenizer.from_json(path)
            except CheckpointError:
                continue
        assert {tuple(tokenizer.encode("aababaab" * 20)) for _ in range(8)} == ids
        loaded += 1
    assert loaded


def test_added_tokens_that_a_normalizer_makes_equal(path):
    """Which of them the library finds depends on the order in a hash table."""
    for texts in (["<X>", "<x>"], ["<X>", "<y>"]):
        case = hostile.content(normalizer={"type": "Lowercase"})
        case["added_tokens"] += [
            hostile.added(300 + i, text, normalized=True, special=False) for i, text in enumerate(texts)
        ]
        hostile.write(path, case)
        if "<x>" in texts:
            with pytest.raises(CheckpointError, match="the added tokens '<X>' and '<x>' are equal after normalization"):
                Tokenizer.from_json(path)
    assert len({tuple(Tokenizer.from_json(path).encode("<X><y> <x>")) for _ in range(5)}) == 1


def test_a_crash_leaves_other_tokenizers_alone(path):
    hostile.write(path, hostile.content())
    good = Tokenizer.from_json(path)
    before = good.encode("ab aab")
    for name in ("doubling", "split at (a+)+$", "parts of length 0"):
        hostile.write(path, BOMBS[name])
        assert isinstance(use(path), str)
        assert good.encode("ab aab") == before


def test_nothing_of_the_library_is_printed_by_the_command_line(tmp_path):
    """A panic of Rust prints a hundred lines, which its own process swallows."""
    path = tmp_path / "tokenizer.json"
    hostile.write(path, BOMBS["empty charsmap"])
    code = "import sys; from jaxspec.text import Tokenizer; Tokenizer.from_json(sys.argv[1])"
    child = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert child.returncode == 1
    assert "PanicException" not in child.stderr
    assert child.stderr.splitlines()[-1].startswith("jaxspec.errors.CheckpointError: ")
