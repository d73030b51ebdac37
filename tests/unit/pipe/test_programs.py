"""Graphs are looked up by the inputs of a step, and asked once for a step whether they are the model's now."""

from fxpipe.pipe.model_calls import ModelCall
from fxpipe.pipe.programs import GraphInputs


class Graph:
    key = "key"

    def __init__(self, is_of_model):
        self.is_of_model = is_of_model

    def holds_for_model(self):
        return self.is_of_model

    def holds_for_values(self, *given):
        return True


def test_an_answer_does_not_outlive_its_graph():
    """Python puts the next object where a dropped one was, with its id."""
    inputs = GraphInputs(ModelCall((), {}, ()), (), "key", 0, {})
    wanted = [False, True] * 4
    assert [inputs.match(Graph(is_of_model)) for is_of_model in wanted] == wanted
