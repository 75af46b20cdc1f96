"""Builds what a release uploads, and installs each part where there is no compiler: `make wheels`.

These are the source distribution, a wheel with kernels for this machine (with auditwheel, for every Linux whose C
library is as new), and a wheel without kernels for every platform. Each is installed into an environment of its own
whose PATH has no compiler, and `installed.py` and `jaxspec demo --short` run from another folder. From the source
distribution, jaxspec must then work without kernels and say why, and with a compiler it must build them.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
INSTALLED = pathlib.Path(__file__).with_name("installed.py")
DEMO = ("demo", "--short")
NOT_IN_SOURCE = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml")
"""Files of the repository that the source distribution leaves out."""


def run(*words: str | pathlib.Path, folder: pathlib.Path = ROOT, **environment: str) -> str:
    """Runs a command, with changes of the environment, and returns what it printed; raises if it fails.

    A variable that is set to an empty text is removed.
    """
    print("+", *words, flush=True)
    changed = {name: value for name, value in (os.environ | environment).items() if value}
    ran = subprocess.run(words, cwd=folder, env=changed, stdout=subprocess.PIPE, text=True, check=False)
    print(ran.stdout, end="", flush=True)
    if ran.returncode:
        raise SystemExit(f"status {ran.returncode} from {' '.join(map(str, words))}")
    return ran.stdout


def build(out: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path, pathlib.Path]:
    """Builds into a folder; returns the source distribution, the wheel with kernels, and the one without."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out)
    (source,) = out.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(source) as archive:
            archive.extractall(place, filter="data")
        (tree,) = pathlib.Path(place).iterdir()  # wheels are built from it, so that it is complete
        run(sys.executable, "-m", "build", "--wheel", "--outdir", out, tree, JAXSPEC_KERNELS="0")
        (pure,) = out.glob("*-py3-none-any.whl")
        raw = pathlib.Path(place, "raw")
        run(sys.executable, "-m", "build", "--wheel", "--outdir", raw, tree, JAXSPEC_KERNELS="")
        (wheel,) = raw.glob("*.whl")
        if sys.platform == "linux":
            run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, wheel,
                PATH=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # fmt: skip
        else:
            shutil.copy(wheel, out)
    (wheel,) = (path for path in out.glob("*.whl") if path != pure)
    return source, wheel, pure


def check_content(source: pathlib.Path, wheel: pathlib.Path, pure: pathlib.Path) -> None:
    """Raises unless the source distribution has all files of the repository, and the wheels all of the package."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in tracked if name not in inside and not name.startswith(NOT_IN_SOURCE)]
    if missing:
        raise SystemExit(f"{source.name} lacks {', '.join(missing)}")
    package = [name for name in tracked if name.startswith("jaxspec/")]
    for path in (wheel, pure):
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
        if missing := [name for name in package if name not in names]:
            raise SystemExit(f"{path.name} lacks {', '.join(missing)}")
        libraries = [name for name in names if name.endswith((".so", ".pyd", ".dylib"))]
        if bool(libraries) != (path == wheel):
            raise SystemExit(f"{path.name} has {libraries or 'no kernels'}")


def check_installed(what: pathlib.Path, kernels: bool, said: str, compiler: bool = False) -> None:
    """Installs a file into an environment of its own, and checks it from another folder.

    Args:
        what: the wheel or the source distribution.
        kernels: whether it is to have kernels then.
        said: what `--version` is to say of them.
        compiler: whether PATH has this machine's compilers.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        venv.create(folder / "venv", with_pip=True, symlinks=True)
        binaries = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        path = str(binaries) + (os.pathsep + os.environ["PATH"] if compiler else "")
        bare = {"PATH": path, "CC": "", "CXX": "", "PYTHONPATH": "", "JAXSPEC_KERNELS": ""}
        if not compiler and (found := shutil.which("c++", path=path) or shutil.which(_compiler(), path=path)):
            raise SystemExit(f"the environment is not bare: {found}")
        python = binaries / "python"
        run(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", what, folder=folder, **bare)
        shown = run(python, "-I", INSTALLED, "with" if kernels else "without", folder=folder, **bare)
        if said not in shown:
            raise SystemExit(f"{what.name}: expected {said!r} of the kernels")
        run(binaries / "jaxspec", *DEMO, folder=folder, **bare)


def _compiler() -> str:
    return (sysconfig.get_config_var("CXX") or "c++").split()[0]


def main() -> None:
    """Builds and checks everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist", help="folder to build into (default: dist)")
    args = parser.parse_args()
    source, wheel, pure = build(args.out.absolute())
    check_content(source, wheel, pure)
    run(sys.executable, "-m", "twine", "check", "--strict", source, wheel, pure)
    check_installed(wheel, True, "kernels: AVX")
    check_installed(pure, False, "a wheel without kernels")
    check_installed(source, False, "there is no C++ compiler")
    check_installed(source, True, "kernels: AVX", compiler=True)
    print("built and tried:", *(path.name for path in (source, wheel, pure)))


if __name__ == "__main__":
    main()
