"""Runs the tests of the CPU kernels under AddressSanitizer and UBSan, for each kind of processor that this one can be.

    make sanitize

It needs a compiler with the sanitizers' libraries, such as g++.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

from jaxspec.kernels.library import VARIABLE
from scripts.prove.mutants import build, has_kernels, prepared

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
TESTS = (
    "tests/kernels/test_kernels.py",
    "tests/kernels/test_blocks.py",
    "tests/models/test_delta.py",
    "tests/models/test_experts.py",
)
PROCESSORS = ("AMX", "AVX-512 with BF16 and VNNI", "AVX-512", "AVX2")


def library(name: str) -> str:
    """Returns the path of one of the compiler's libraries."""
    return subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        folder = prepared(None, pathlib.Path(place))
        build(folder, FLAGS)
        failed = 0
        for processor in PROCESSORS:
            if not has_kernels(processor):
                print(f"{processor}: this processor is none, so these kernels are not tested here", flush=True)
                continue
            environment = os.environ | {
                "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')} {library('libstdc++.so.6')}",
                "ASAN_OPTIONS": "detect_leaks=0",  # Python does not free everything at its end
                "PYTHONPATH": str(folder),
                "PYTHONDONTWRITEBYTECODE": "1",
                VARIABLE: processor,
            }
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0"]
            command += [*TESTS, "-m", "not slow", *sys.argv[1:]]
            print(processor, flush=True)
            failed += subprocess.run(command, cwd=folder, env=environment).returncode != 0
        return failed


if __name__ == "__main__":
    sys.exit(main())
