"""Which tests take long? Writes tests/long_tests.txt, whose functions `make test` leaves to `make test-long`.

    .venv/bin/python -m pytest -n 2 --dist worksteal --junitxml=build/times.xml  # everything, on an idle machine
    .venv/bin/python tools/long_tests.py build/times.xml

A function is long if its cases together take longer than `--seconds`, unless a fault of tools/mutants.py names it: what
sees faults runs after every change.
"""

from __future__ import annotations

import argparse
import functools
import operator
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from mutants import MUTANTS, ROOT


def seconds_by_function(report: Path) -> Counter[str]:
    """Returns the seconds of each test function of a report, all its cases added, as `unit/test_x.py::test_y`."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.get("classname", "").split(".")
        file = next((k for k, part in enumerate(parts) if part.startswith("test_")), None)
        if file is None:  # of a worker that ended
            continue
        name = case.get("name", "").partition("[")[0]
        function = "::".join(["/".join(parts[1 : file + 1]) + ".py", *parts[file + 1 :], name])
        seconds[function] += float(case.get("time", 0))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reports", type=Path, nargs="+", help="what pytest --junitxml has written")
    parser.add_argument("--seconds", type=float, default=0.2, help="a function that takes longer is long")
    options = parser.parse_args()
    seconds = functools.reduce(operator.or_, map(seconds_by_function, options.reports))
    kept = {name.partition("[")[0] for mutant in MUTANTS for name in mutant.tests.split()}
    long = {name for name, taken in seconds.items() if taken > options.seconds and name not in kept}
    (ROOT / "tests" / "long_tests.txt").write_text("".join(f"{name}\n" for name in sorted(long)), encoding="utf-8")
    rest = sum(taken for name, taken in seconds.items() if name not in long)
    print(f"{len(long)} of {len(seconds)} functions are long; the others take {rest:.0f} of {seconds.total():.0f} s")


if __name__ == "__main__":
    main()
