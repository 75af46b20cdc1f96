"""Runs the notebooks and saves them with what they print and draw.

scripts/run_notebooks.py            # all of them
scripts/run_notebooks.py one_round

Standard error, the times of cells and the version of Python are left out, so that a run on another machine changes as
little as possible. A notebook that prints a path of this machine is not saved.
"""

import argparse
import pathlib
import re
import sys
import tempfile

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PATH = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|var|usr|opt|mnt|work|Users|private)/\S*|[A-Z]:\\\S*")
TIMEOUT = 1800


class ThisPython(KernelSpecManager):
    """Kernels of the Python that runs this, whatever others are installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name=kernel_name, language="python")


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook: nbformat.NotebookNode) -> None:
    """Runs all cells from top to bottom in the root of the repository, and keeps what they print and draw."""
    client = NotebookClient(notebook, timeout=TIMEOUT, record_timing=False, resources={"metadata": {"path": str(ROOT)}})
    client.create_kernel_manager().kernel_spec_manager = ThisPython()
    client.execute()
    notebook.metadata.language_info = nbformat.from_dict({"name": "python"})
    for cell in code_cells(notebook):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def text_of(cell: nbformat.NotebookNode) -> str:
    """What a cell shows as text."""
    shown = []
    for output in cell.outputs:
        shown.append(output.get("text", ""))
        shown += [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(shown)


def paths_in(notebook: nbformat.NotebookNode) -> list[str]:
    """The paths of a machine that the outputs hold."""
    shown = "\n".join(map(text_of, code_cells(notebook)))
    own = [str(place) for place in (ROOT, pathlib.Path.home(), sys.prefix, tempfile.gettempdir()) if str(place) != "/"]
    return sorted({*PATH.findall(shown), *(place for place in own if place in shown)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(path.stem for path in NOTEBOOKS))
    names = parser.parse_args().names
    chosen = [path for path in NOTEBOOKS if not names or path.stem in names]
    if unknown := set(names) - {path.stem for path in chosen}:
        parser.error(f"there is no notebook {', '.join(sorted(unknown))}")
    status = 0
    for path in chosen:
        notebook = nbformat.read(path, as_version=4)
        execute(notebook)
        if found := paths_in(notebook):
            print(f"{path.name}: not saved, since it shows paths of this machine: {', '.join(found)}", file=sys.stderr)
            status = 1
            continue
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
    return status


if __name__ == "__main__":
    sys.exit(main())
