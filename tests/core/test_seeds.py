"""Tests that every bit of a seed counts, in Python and on the command line, and that a limit is named."""

import argparse
from typing import Any

import jax
import numpy as np
import pytest

from helpers.narrow import not_none
from jaxspec.cli import acceptance as acceptance_command
from jaxspec.cli import bench, generate, tune
from jaxspec.cli.options import Parser, UsageError, read_options, whole_type
from jaxspec.core.noise import seed_key
from jaxspec.errors import InvalidConfig
from jaxspec.generation.drafting import Drafting

pytestmark = pytest.mark.quick

SMALL = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, *np.random.default_rng(0).integers(0, 2**32, 60).tolist()]
LARGE = [
    2**32,
    2**32 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    *(seed << 32 for seed in SMALL[1:]),
    *(s + 2**40 for s in SMALL),
]


def data(key) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_seeds_of_32_bits_have_the_keys_of_jax():
    for seed in SMALL:
        assert data(seed_key(seed)) == data(jax.random.key(seed))


def test_larger_seeds_have_keys_of_their_own():
    """131 seeds: those of equal lowest bits differ, and the keys are those that JAX makes with 64-bit types."""
    seeds = sorted({*SMALL, *LARGE})
    keys = [data(seed_key(seed)) for seed in seeds]
    assert len(set(keys)) == len(seeds) > 120
    for seed in LARGE:
        with jax.enable_x64(True):
            assert data(jax.random.key(np.uint64(seed))) == data(seed_key(seed)) == (seed >> 32, seed & 0xFFFFFFFF)


@pytest.mark.parametrize("seed", [-1, 2**64, 10**30, 0.5, True, None, "1", np.float32(1)])
def test_a_seed_is_a_whole_number_below_the_limit(seed: Any):
    with pytest.raises(
        InvalidConfig, match=r"^seed must be a whole number from 0( to 18446744073709551615)?, got "
    ) as caught:
        seed_key(seed)
    assert ("18446744073709551615" in str(caught.value)) == (type(seed) is int and seed > 0)


def parsed(command, *words) -> argparse.Namespace:
    parser = Parser(prog="jaxspec command")
    command.add_options(parser)
    return parser.parse_options([*words])


def test_the_command_line_takes_every_seed():
    keys = set()
    for seed in [0, 4294967296, 2**33, 2**63, 2**64 - 1]:
        args = parsed(generate, "hi", "--seed", str(seed))
        keys.add(data(not_none(read_options(args, Drafting()).key)))
    assert len(keys) == 5


@pytest.mark.parametrize("command", [generate, bench, tune, acceptance_command])
@pytest.mark.parametrize("seed", [str(2**64), str(10**30), "1" + "0" * 5000, "-1", "x", "1.0", "", "\u0663"], ids=ascii)
def test_a_seed_beyond_the_limit_is_refused_with_the_limit(command, seed):
    with pytest.raises(UsageError) as caught:
        parsed(command, *["hi"] * (command in (generate, tune)), f"--seed={seed}")
    assert "expected a whole number from 0" in str(caught.value)
    assert len(str(caught.value)) < 300
    if seed.startswith("1") and seed.isdigit():
        assert "from 0 to 18446744073709551615" in str(caught.value)


def test_every_whole_number_of_the_command_line_has_a_limit_that_is_named():
    """Generated limits and values, 300 of them: a value within is taken, and a message names what is wrong."""
    rng = np.random.default_rng(1)
    for _ in range(100):
        least = int(rng.integers(0, 3))
        most = int(rng.choice([9, 1024, 2**31 - 1, 2**64 - 1]))
        check = whole_type(least, most)
        assert check(str(most)) == most
        assert check(f"{least:030d}") == least
        for wrong in (most + 1, most * 10**25):
            with pytest.raises(argparse.ArgumentTypeError, match=f"from {least} to {most}, got '"):
                check(str(wrong))
