"""Prints what the changelog says of a release, and fails unless the checkout is ready to be released under that tag.

`python scripts/release_notes.py v0.2.0`
"""

import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
VERSIONS = {
    "jaxspec/version.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
}
"""Files besides pyproject.toml that have the version."""


def versions(root: pathlib.Path = ROOT) -> dict[str, str]:
    """Returns the version by the file that has it."""
    found = {"pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]}
    for name, pattern in VERSIONS.items():
        match = re.search(pattern, (root / name).read_text(), re.MULTILINE)
        found[name] = match[1] if match else "none"
    return found


def notes(tag: str, root: pathlib.Path = ROOT) -> str:
    """Returns the section of the tag's version in CHANGELOG.md.

    Raises:
        SystemExit: a file has another version, the address of the repository is a placeholder, or the changelog has
            no dated section of the version.
    """
    version = tag.removeprefix("v")
    for name, other in versions(root).items():
        if tag != f"v{other}":
            raise SystemExit(f"the tag is {tag}, and the version in {name} is {other}; expected v{other}")
    if "/OWNER/" in (root / "pyproject.toml").read_text():
        raise SystemExit("pyproject.toml has OWNER in the address of the repository; write the real one in all files")
    changelog = (root / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[{re.escape(version)}\] - (\S+)\n((?:(?!## ).*\n?)*)", changelog, re.MULTILINE)
    if found is None or not found[2].strip():
        raise SystemExit(f"CHANGELOG.md has no section '## [{version}] - DATE' with text")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1]):
        raise SystemExit(f"CHANGELOG.md has version {version} as {found[1]!r}; write the date, as in 2027-01-31")
    return found[2].strip()


if __name__ == "__main__":
    print(notes(sys.argv[1]))
