"""What is released: a wheel built from the sdist, in an environment that has nothing but what it says it needs."""

import os
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest
from helpers.paths import ROOT
from packaging.requirements import Requirement

import fxpipe

pytestmark = pytest.mark.slow

BUILD = "import setuptools.build_meta as b, sys; print(b.build_{}(sys.argv[1]))"
SCRIPT = """\
import fxpipe
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
x, target = torch.randn(8, 8), torch.randn(8, 4)
want = nn.functional.mse_loss(model(x), target)
with fxpipe.pipeline(model, ["cpu", "cpu"], chunks=4, progress=False) as pipe:
    loss = pipe.forward_backward(x, target=target, loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(loss, want)
    pipe.plan.save("plan.json")
    print(fxpipe.__file__)
"""


def run(*command: object, cwd: Path) -> str:
    """Runs a command, without this environment's packages and those of the checkout. Returns what it prints."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=own, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def dependencies(distribution: metadata.Distribution) -> dict[str, metadata.Distribution]:
    """All that a distribution needs, without extras, by name."""
    todo, needed = [distribution], dict[str, metadata.Distribution]()
    while todo:
        for text in todo.pop().requires or ():
            requirement = Requirement(text)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and requirement.name.lower() not in needed:
                one = metadata.distribution(requirement.name)
                assert one.version in requirement.specifier or not requirement.specifier
                needed[requirement.name.lower()] = one
                todo.append(one)
    return needed


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that the wheel was installed into."""
    folder = tmp_path_factory.mktemp("package")
    source, dist = folder / "source", folder / "dist"
    shutil.copytree(ROOT / "fxpipe", source / "fxpipe", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-W", "error", "-c", BUILD.format("sdist"), dist, cwd=source)
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "sdist", filter="data")
    run(sys.executable, "-c", BUILD.format("wheel"), dist, cwd=folder / "sdist" / archive.name.removesuffix(".tar.gz"))
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "empty", cwd=folder)
    python = folder / "empty" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = (folder / "empty").glob("lib/python*/site-packages")
    (information,) = site.glob("fxpipe-*.dist-info")
    needs = folder / "needs"  # as the index has them: those of this environment, and no others
    needs.mkdir()
    for one in dependencies(metadata.Distribution.at(information)).values():
        for top in {path.parts[0] for path in one.files or () if path.parts[0] not in ("..", "__pycache__")}:
            if not (needs / top).exists():
                (needs / top).symlink_to(Path(str(one.locate_file(top))))
    (site / "needs.pth").write_text(f"{needs}\n")
    return python


def test_a_pipe_trains_in_an_environment_of_its_own(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    where = run(installed, "script.py", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(installed.parents[1])
    assert Path(where).with_name("py.typed").exists()  # `make lint` checks a typed script
    run(installed, "-m", "fxpipe.inspect", "plan.json", "--report", "r.html", "--graph", "g.svg", cwd=tmp_path)
    assert "</html>" in (tmp_path / "r.html").read_text()  # the styles and scripts of which are files of the package


def test_the_report_of_an_environment(installed: Path, tmp_path: Path) -> None:
    lines = dict(line.split(maxsplit=1) for line in run(installed, "-m", "fxpipe", cwd=tmp_path).splitlines())
    assert lines["fxpipe"].startswith(fxpipe.__version__)
    assert lines["Python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert {"torch", "system", "CPU", "threads", "devices"} <= {*lines}
    assert "transformers" not in lines  # it is not there
