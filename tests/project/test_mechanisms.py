"""The mechanisms that `tools/coverage.py --mechanisms` counts are there, and it is seen who takes them."""

import json
import subprocess
import sys

import pytest
from helpers.paths import ROOT
from zoo.mechanisms import MECHANISMS, NO_MODEL, Mechanism, is_justified, missed, resolve

TESTS = ROOT / "tests"


def test_each_place_of_a_mechanism_is_a_function():
    assert all(resolve(place) is not None for mechanism in MECHANISMS for place in mechanism.places)


def test_a_place_that_is_gone_is_seen():
    for place in ("utils.units.human", "no_such_room.of", "utils.units.human_bytes.inner"):
        with pytest.raises(LookupError):
            resolve(place)


def test_what_no_model_takes_has_to_be_asked_for_or_say_who_needs_it():
    called = {f"fxpipe.{place}" for mechanism in MECHANISMS for place in mechanism.places}
    justified = [mechanism.name for mechanism in MECHANISMS if is_justified(mechanism)]
    assert justified
    assert [name for name, _ in missed([called])] == justified  # taken after all
    silent = {m.name for m in MECHANISMS if not m.asked_by} - set(justified)
    assert {name for name, _ in missed([])} == silent
    assert not Mechanism("", ("utils.units.percent?",)).is_taken({"fxpipe.utils.units.percent"})


def test_comments_that_justify_stand_above_mechanisms():
    comments = sum(path.read_text().count(f"# {NO_MODEL}") for path in (ROOT / "fxpipe").rglob("*.py"))
    assert comments == sum(map(is_justified, MECHANISMS))


def test_calls_are_noted_where_a_function_begins_and_returns_something():
    code = """
import torch, fxpipe, json
from helpers.called_functions import called
from fxpipe.utils.units import percent
called.clear()
try:
    percent(None)
except TypeError as error:
    lines = [error.__traceback__.tb_next.tb_lineno]
begun = sorted(called)
percent(0.5)
print(json.dumps([begun, sorted(called), lines]))
"""
    run = (TESTS / "helpers" / "called_functions.py").stem
    script = f"import sys, runpy; from helpers import {run}; {run}.install(); exec({code!r})"
    ran = subprocess.run([sys.executable, "-c", script], cwd=TESTS, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    begun, called, lines = json.loads(ran.stdout)
    assert begun == ["fxpipe.utils.units.percent"]
    assert called == ["fxpipe.utils.units.percent", "fxpipe.utils.units.percent?"]
    source = (ROOT / "fxpipe" / "utils" / "units.py").read_text().splitlines()
    assert "return" in source[lines[0] - 1]  # the lines of the file, not of the changed code
