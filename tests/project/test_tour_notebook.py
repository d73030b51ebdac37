"""`examples/tour.ipynb`: its code runs, what it shows is stored, and a kernel shows the same again."""

import json
import re
from typing import Any

import pytest
from helpers.paths import ROOT, module_at

NOTEBOOK = ROOT / "examples" / "tour.ipynb"
MACHINE_PATHS = re.compile(r"/(?:home|root|tmp|work|Users)/[\w./-]+")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def texts_of(outputs: list[Any]) -> list[str]:
    """All that a cell shows, in each of its forms."""
    shown = [output.get("text", "") for output in outputs]
    shown += [text for output in outputs for text in output.get("data", {}).values()]
    return ["".join(text) for text in shown]


@pytest.fixture
def notebook() -> Any:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def test_its_code_runs_from_the_first_cell_to_the_last(notebook, tmp_path, monkeypatch, capsys):
    """Without a kernel: in one namespace. Cells assert what they say of the plain model."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for index, cell in enumerate(code_cells(notebook), 1):
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {index}", "exec"), namespace)
    finally:
        namespace.clear()  # as at the end of a script: classes hold its names, and so its pipes
    assert "portal" in capsys.readouterr().out


def test_what_it_shows_is_stored(notebook):
    outputs = [cell["outputs"] for cell in code_cells(notebook)]
    shown = [text for cell in outputs for text in texts_of(cell)]
    assert sum(map(bool, outputs)) == len(outputs) - 1  # all but the first, which defines the model
    assert not [output for cell in outputs for output in cell if output["output_type"] == "error"]
    assert not [output for cell in outputs for output in cell if output.get("name") == "stderr"]
    assert sum("<svg" in text for text in shown) >= 3  # steps that ran, and one that was simulated
    assert not [match for text in shown for match in MACHINE_PATHS.findall(text)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:.*without encryption.*")
def test_a_kernel_shows_the_same(notebook):
    """The same forms in each cell; times are others."""
    pytest.importorskip("nbclient", reason="nbclient is not installed: pip install fxpipe[trainers]")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install fxpipe[trainers]")
    tool = module_at(ROOT / "tools" / "run_notebook.py")
    for now, stored in zip(code_cells(tool.run_notebook(NOTEBOOK)), code_cells(notebook), strict=True):
        forms = [[sorted(output.get("data", {"text": ""})) for output in cell["outputs"]] for cell in (now, stored)]
        assert forms[0] == forms[1], now["source"]
