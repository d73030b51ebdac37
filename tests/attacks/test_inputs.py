"""What forward may ask of its inputs besides sizes and values: identity, memory, layout, signs of zero, functions."""

import functools
import math

import pytest
import torch
from helpers.compared_steps import WAYS, refusal_of
from helpers.layered import Layered
from helpers.oracle import closing

import fxpipe

WIDTH = 6


class Asking(Layered, first=WIDTH, last=WIDTH):
    """Two layers around what `ask(module, *inputs)` returns."""

    def forward(self, *inputs):
        return self.last(self.ask(self, *inputs).relu())


def values(step, *shape):
    return torch.randn(*(shape or (4, WIDTH)), generator=torch.Generator().manual_seed(step))


def steps(*kinds):
    """Inputs of steps by turns: each kind makes them of the number of the step."""
    return lambda step: kinds[step % len(kinds)](step)


# -- the same tensor twice --------------------------------------------------------------------------------------------


def twice(step):
    x = values(step)
    return x, x


def two(step):
    return values(step), values(step)


def by(asks):
    """What `Asking` takes: another result where the inputs are not the same, as `asks` says."""
    return lambda module, x, y: module.first(x) if asks(x, y) else module.first(x) * 2 + y


asks_is = by(lambda x, y: x is y)


def asks_a_set(module, x, y):
    return module.first(x) * len({x, y})


def asks_a_dict(module, x, y):
    layers = {x: 1.0, y: 2.0}
    return module.first(x) * layers[x]


def skips_what_it_knows(module, x, y):
    known = {}
    for tensor in (x, y):
        known.setdefault(id(tensor), module.first(tensor))
    return sum(known.values())


IN_MEMORY = {
    "data_ptr": by(lambda x, y: x.data_ptr() == y.data_ptr()),
    "storage": by(lambda x, y: x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()),
}


def writes(module, x, y):
    x.add_(1)
    return module.first(x) + y


TWICE = {
    "is": asks_is,
    "set": asks_a_set,
    "dict": asks_a_dict,
    "cache": skips_what_it_knows,
    "is_set_to": by(lambda x, y: x.is_set_to(y)),
} | IN_MEMORY


@pytest.mark.parametrize("inputs", [steps(twice, two), steps(two, twice)], ids=["same_first", "two_first"])
@pytest.mark.parametrize("name", TWICE)
def test_the_same_tensor_twice(name, inputs):
    assert refusal_of(lambda: Asking(ask=TWICE[name]), inputs) == ""


@pytest.mark.parametrize("inputs", [steps(twice, two), steps(two, twice)], ids=["same_first", "two_first"])
def test_writing_to_a_tensor_that_is_given_twice_is_refused(inputs):
    assert "overlaps" in refusal_of(lambda: Asking(ask=writes), inputs)


@pytest.mark.parametrize("ask", [asks_is, skips_what_it_knows])
@pytest.mark.parametrize("way", ["forward_backward", "train_stream"])
def test_the_same_tensor_twice_in_other_ways(ask, way):
    assert refusal_of(lambda: Asking(ask=ask), steps(twice, two), way) == ""


def test_the_gradient_of_a_tensor_that_is_given_twice():
    model = Asking(ask=skips_what_it_knows)
    x, own = values(0).requires_grad_(), values(0).requires_grad_()
    model(own, own).sum().backward()
    with fxpipe.pipeline(model, ["cpu", "cpu"], chunks=2) as pipe:
        pipe(x, x).sum().backward()
    torch.testing.assert_close(x.grad, own.grad)


def views_of_one(step):
    both = torch.cat(two(step))
    return both[:4], both[4:]


@pytest.mark.parametrize("ask", IN_MEMORY.values(), ids=IN_MEMORY)
def test_memory_that_inputs_share_is_refused_where_forward_asks_for_it(ask):
    assert "the memory of its inputs" in refusal_of(lambda: Asking(ask=ask), steps(two, views_of_one))


def test_memory_that_inputs_share_is_right_where_forward_does_not_ask():
    assert refusal_of(lambda: Asking(ask=asks_is), steps(two, views_of_one)) == ""


def test_in_dims_may_not_cut_one_tensor_in_two_ways():
    x = values(0)
    pipe = fxpipe.pipeline(Asking(ask=asks_is), ["cpu", "cpu"], chunks=2, in_dims=(0, None))
    with closing(pipe), pytest.raises(fxpipe.errors.ArgumentError, match=r"are the same tensor.*clone"):
        pipe(x, x)


# -- layout -----------------------------------------------------------------------------------------------------------


def dense(step):
    return (values(step, 4, WIDTH, WIDTH),)


LAID_OUT = {
    "transposed": lambda step: (dense(step)[0].transpose(1, 2),),
    "with gaps": lambda step: (values(step, 4, WIDTH, 2 * WIDTH)[..., ::2],),
    "expanded": lambda step: (values(step, 4, 1, WIDTH).expand(4, WIDTH, WIDTH),),
    "behind others": lambda step: (values(step, 8, WIDTH, WIDTH)[4:],),
}
LAYOUTS = {  # numbers that depend on them
    "is_contiguous": lambda x: 1 if x.is_contiguous() else 2,
    "strides": lambda x: x.stride()[1],
    "last stride": lambda x: x.stride(-1),
    "dim_order": lambda x: 1 if x.dim_order() == (0, 1, 2) else 2,
    "is_dense": lambda x: 1 if torch.ops.aten.is_non_overlapping_and_dense(x) else 2,
    "of a view": lambda x: 1 if x.transpose(1, 2).is_contiguous() else 2,
    "storage_offset": lambda x: 1 if x.storage_offset() == 0 else 2,
    "bytes": lambda x: 1 if x.untyped_storage().nbytes() == x.nbytes else 2,
}


def times(number):
    return lambda module, x: module.first(x) * number(x)


@pytest.mark.parametrize("other", LAID_OUT)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_right_or_refused(name, other):
    for inputs in (steps(dense, LAID_OUT[other]), steps(LAID_OUT[other], dense)):
        refusal = refusal_of(lambda: Asking(ask=times(LAYOUTS[name])), inputs)
        assert not refusal or "test_inputs.py:" in refusal or "differs from the model's" in refusal


@pytest.mark.parametrize("way", ["drop-in", "forward_backward", "train_stream"])
@pytest.mark.parametrize("name", ["is_contiguous", "of a view"])
def test_each_layout_has_its_graph(name, way):
    """Also in `channels_last`."""

    def last(step):
        return (values(step, 4, 3, 2, WIDTH).to(memory_format=torch.channels_last),)

    inputs = steps(lambda step: (values(step, 4, 3, 2, WIDTH),), last)
    assert refusal_of(lambda: Asking(ask=times(LAYOUTS[name])), inputs, way) == ""


def does_not_ask(module, x):
    return module.first(x)


def makes_it_contiguous(module, x):
    return module.first(x if x.is_contiguous() else x.contiguous())


@pytest.mark.parametrize("ask", [does_not_ask, makes_it_contiguous])
@pytest.mark.parametrize("way", WAYS)
def test_layouts_that_make_no_difference_are_right(ask, way):
    inputs = steps(dense, *(LAID_OUT[name] for name in ("transposed", "with gaps", "behind others")))
    assert refusal_of(lambda: Asking(ask=ask), inputs, way, steps=4) == ""


# -- the state of autograd and flags ----------------------------------------------------------------------------------


def leaf(x):
    return x[4:].clone().requires_grad_()


def with_gradient(x):
    x = leaf(x)
    x.grad = torch.ones_like(x)
    return x


def conjugate(x):
    return torch.view_as_complex(x.view(-1, WIDTH, 2)).conj()


KINDS = {  # made of 8 x WIDTH numbers
    "whole": lambda x: x[4:].clone(),
    "view": lambda x: x[4:],
    "written": lambda x: x[4:].clone().add_(0),
    "leaf": leaf,
    "of a function": lambda x: leaf(x) * 1,
    "with gradient": with_gradient,
    "conjugate": conjugate,
    "resolved": lambda x: conjugate(x).resolve_conj(),
}
QUESTIONS = {
    "requires_grad": (lambda x: x.requires_grad, "whole", "leaf"),
    "is_leaf": (lambda x: x.is_leaf, "leaf", "of a function"),
    "grad_fn": (lambda x: x.grad_fn is None, "leaf", "of a function"),
    "grad": (lambda x: x.grad is None, "leaf", "with gradient"),
    "base": (lambda x: x._base is None, "whole", "view"),
    "is_view": (lambda x: x._is_view(), "whole", "view"),
    "version": (lambda x: x._version == 0, "whole", "written"),
    "is_conj": (lambda x: x.is_conj(), "resolved", "conjugate"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_about_a_tensor_are_right_or_refused(name):
    question, *names = QUESTIONS[name]
    kinds = [lambda step, make=KINDS[kind]: (make(values(step, 8, WIDTH)),) for kind in names]

    def ask(module, x):
        return module.first(x.real if x.is_complex() else x) * (2 if question(x) else 1)

    for inputs in (steps(*kinds), steps(*reversed(kinds))):
        refusal = refusal_of(lambda: Asking(ask=ask), inputs)
        assert not refusal or "test_inputs.py:" in refusal


# -- signs of zero ----------------------------------------------------------------------------------------------------


def zeros(make):
    return steps(lambda step: (values(step), make(0.0)), lambda step: (values(step), make(-0.0)))


@pytest.mark.parametrize("way", ["drop-in", "forward_backward", "train_stream"])
def test_minus_zero_is_another_number(way):
    def ask(module, x, zero):
        return module.first(x) * math.copysign(1, zero)

    assert refusal_of(lambda: Asking(ask=ask), zeros(lambda zero: zero), way) == ""


ZEROS = {
    "in a list": (lambda zero: [1.0, zero], lambda zero: zero[1]),
    "in a dict": (lambda zero: {"a": (zero,)}, lambda zero: zero["a"][0]),
    "complex": (lambda zero: complex(0, zero), lambda zero: zero.imag),
    "real": (lambda zero: complex(zero, 0), lambda zero: zero.real),
    "read of a tensor": (torch.tensor, lambda zero: zero.item()),
    "in a list of a tensor": (lambda zero: torch.tensor([1.0, zero]), lambda zero: zero.tolist()[1]),
    "as a text": (lambda zero: zero, lambda zero: float(f"{zero}1")),
    "as an angle": (lambda zero: zero, lambda zero: math.atan2(zero, -1)),
}


@pytest.mark.parametrize("name", ZEROS)
def test_minus_zero_in_any_place(name):
    make, number = ZEROS[name]

    def ask(module, x, zero):
        return module.first(x) * math.copysign(1, number(zero))

    options = {} if "list of a tensor" not in name else {"in_dims": (0, None)}
    assert refusal_of(lambda: Asking(ask=ask), zeros(make), **options) == ""


# -- functions --------------------------------------------------------------------------------------------------------


def factor(number):
    return lambda h: h * number


class Scale:
    number = 1

    def __call__(self, h):
        return h * self.number

    def scale(self, h):
        return h * self.number


scale, numbers = Scale(), {"one": 1}


def by_global(h):
    return h * numbers["one"]


def by_default(h, number=1):
    return h * number


def make_closure():
    number = 1

    def by_cell(h):
        return h * number

    def set_number(other):
        nonlocal number
        number = other

    return by_cell, set_number


by_cell, set_number = make_closure()


def change(step):
    """Changes what these functions depend on; not what they are."""
    scale.number = numbers["one"] = step + 1
    by_default.__defaults__ = (step + 1,)
    set_number(step + 1)


FUNCTIONS = {
    "a new closure": lambda step: factor(step + 1),
    "another lambda": lambda step: (lambda h: h * 2) if step % 2 else (lambda h: h * 3),
    "the same closure": lambda step: by_cell,
    "a function with a global": lambda step: by_global,
    "a function with a default": lambda step: by_default,
    "a bound method": lambda step: scale.scale,
    "an object": lambda step: scale,
    "partial": lambda step: functools.partial(torch.mul, other=step + 1),
    "partial of a closure": lambda step: functools.partial(by_cell),
    "a function of torch": lambda step: torch.tanh if step % 2 else torch.relu,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_are_given(name):
    def inputs(step):
        change(step)
        return values(step), FUNCTIONS[name](step)

    assert refusal_of(lambda: Asking(ask=lambda module, x, function: function(module.first(x))), inputs) == ""


@pytest.mark.parametrize("way", ["forward_backward", "micro_batches", "train_stream"])
def test_a_function_in_a_dict_in_other_ways(way):
    def inputs(step):
        return values(step), {"act": factor(step + 1)}

    assert refusal_of(lambda: Asking(ask=lambda module, x, given: given["act"](module.first(x))), inputs, way) == ""


# -- outputs that are inputs ------------------------------------------------------------------------------------------


class Through(Layered, first=WIDTH, last=WIDTH):
    def forward(self, x, mask):
        return {"y": self.last(self.first(x)), "x": x, "mask": [mask]}


@pytest.mark.parametrize("grad", [False, True])
def test_an_output_that_is_an_input_is_the_same_object(grad):
    x, mask = values(0).requires_grad_(grad), torch.ones(4)
    with fxpipe.pipeline(Through(), ["cpu", "cpu"], chunks=2) as pipe:
        out = pipe(x, mask)
        assert out["x"] is x
        assert out["mask"][0] is mask
        if grad:
            (out["y"].sum() + out["x"].sum()).backward()
            own = values(0).requires_grad_()
            want = fxpipe.unwrap(pipe)(own, mask)
            (want["y"].sum() + want["x"].sum()).backward()
            torch.testing.assert_close(x.grad, own.grad)
