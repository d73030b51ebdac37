"""Runs notebooks from their first cell to the last, and writes what they show into them.

python tools/run_notebook.py examples/tour.ipynb
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient


def run_notebook(path: Path) -> Any:
    """Returns the notebook with what its cells show, run by a kernel of its own in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell has raised.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory() as folder:
        settings = {"metadata": {"path": folder}}
        options = {"kernel_name": "python3", "coalesce_streams": True, "record_timing": False}
        NotebookClient(notebook, timeout=300, resources=settings, **options).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_progress(output)]
    return notebook


def _is_progress(output: Any) -> bool:
    """Returns whether this is a bar of progress, there or gone: a slow machine shows one."""
    text = output.get("text", "") if output.get("name") == "stderr" else "other"
    return not text.strip() or text.startswith("fxpipe: planning takes more than")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    for path in parser.parse_args().notebooks:
        nbformat.write(run_notebook(path), path)


if __name__ == "__main__":
    main()
