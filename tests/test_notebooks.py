"""Every notebook runs from top to bottom; what it claims it asserts itself."""

import pathlib
import sys

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


class ThisPython(KernelSpecManager):
    """Kernels of the Python that runs the tests, whatever others are installed."""

    def get_kernel_spec(self, kernel_name):
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name=kernel_name, language="python")


def test_there_are_notebooks():
    assert "one_round" in [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, request):
    notebook = nbformat.read(path, as_version=4)
    if "smollm2" in path.read_text():
        request.getfixturevalue("smollm2_path")  # skipped where there are no weights
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "commit it without outputs"
    assert any("assert " in cell.source for cell in cells)
    cells[-1].source += "\nimport sys\nprint('ran to the end in', sys.executable)"
    client = NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(ROOT)}})
    client.create_kernel_manager().kernel_spec_manager = ThisPython()
    client.execute()
    printed = "".join(output.get("text", "") for output in cells[-1].outputs)
    assert f"ran to the end in {sys.executable}" in printed
