"""The kinds of hidden state: what a model, a loss or a loop may change or hide from whoever traces it once.

Operations, as in `random_models.operations`, that hide how samples act on each other behind gates, read Python values
that change between steps, put hooks on tensors or seed their own draws; and twists of a whole case. `make stress` draws
them besides the others and counts how often it has drawn each.
"""

from random_models.operations import LAYER, Operation, table


def _gate(value: str) -> str:
    return f"self.gate_$k = nn.Parameter({value})"


GATES = table(
    Operation("rezero", "$o = $v + self.gate_$k * self.layer_$k($w * 1)", f"{LAYER}\n{_gate('torch.zeros(())')}"),
    Operation("layer_scale", "$o = $v + self.gate_$k * $w", _gate("torch.full((4,), 1e-6)")),
    Operation("closed_flip", "$o = $v + self.gate_$k * $w.flip(0)", _gate("torch.zeros(())"), mixes=True),
    Operation(
        "nearly_closed_flip",
        "$o = $v + self.gate_$k.sigmoid() * $w.flip(0)",
        _gate("torch.tensor(-20.0)"),
        change="$self.gate_$k.fill_(seed % 2 - 0.5)",
        mixes=True,
    ),
    Operation(
        "closed_mean", "$o = $v + self.gate_$k.tanh() * $w.mean(0, keepdim=True)", _gate("torch.zeros(4)"), mixes=True
    ),
    Operation(
        "opened_roll",
        "$o = torch.where(self.open_$k > 0, $v + $w.roll(1, 0), $v + $w)",
        'self.register_buffer("open_$k", torch.zeros(()))',
        change="$self.open_$k.fill_(seed % 2)",
        mixes=True,
    ),
)

# Each reads a value that `change` sets before a step.
PYTHON_STATE = table(
    Operation(
        "namespace",
        "$o = $v * self.options_$k.scale",
        "self.options_$k = types.SimpleNamespace(scale=0.5)",
        change="$self.options_$k.scale = 0.5 + seed % 3",
    ),
    Operation(
        "dictionary",
        '$o = $v * self.options_$k["scale"]',
        'self.options_$k = {"scale": 0.5}',
        change='$self.options_$k["scale"] = 0.5 + seed % 3',
    ),
    Operation(
        "nested_config",
        "$o = $v * self.options_$k.inner.scale",
        "self.options_$k = types.SimpleNamespace(inner=types.SimpleNamespace(scale=0.5))",
        change="$self.options_$k.inner.scale = 0.5 + seed % 3",
    ),
    Operation(
        "global_value", "$o = $v * SCALE_$k", top="SCALE_$k = 0.5", change="globals()['SCALE_$k'] = 0.5 + seed % 3"
    ),
    Operation(
        "class_attribute",
        "$o = $v * Options_$k.scale",
        top="class Options_$k:\n    scale = 0.5",
        change="Options_$k.scale = 0.5 + seed % 3",
    ),
    Operation(
        "default_argument",
        "$o = scaled_$k($v)",
        top="def scaled_$k(value, scale=0.5):\n    return value * scale",
        change="scaled_$k.__defaults__ = (0.5 + seed % 3,)",
    ),
    Operation(
        "closure",
        "$o = scaled_$k($v)",
        top="def make_$k():\n    scale = 0.5\n\n    def scaled(value):\n        return value * scale\n\n"
        "    return scaled\n\n\nscaled_$k = make_$k()",
        change="scaled_$k.__closure__[0].cell_contents = 0.5 + seed % 3",
    ),
    Operation(
        "patched_method",
        "$o = self.layer_$k($v * 1)",
        LAYER,
        change="$self.layer_$k.forward = torch.tanh if seed % 2 else torch.relu",
    ),
    Operation(
        "module_hook",
        "$o = self.layer_$k($v * 1)",
        LAYER,
        change="seed % 2 and $self.layer_$k.register_forward_hook(lambda module, args, out: out * 0.5)",
    ),
)

HOOKS = table(
    Operation(
        "clamped_gradient", "$o = $v * 1\nif $o.requires_grad:\n    $o.register_hook(lambda g: g.clamp(-0.01, 0.01))"
    ),
    Operation("scaled_gradient", "$o = $v + $w\nif $o.requires_grad:\n    $o.register_hook(lambda g: 2 * g)"),
    Operation("dropped_gradient", "$o = $v * 1\nif $o.requires_grad:\n    $o.register_hook(torch.zeros_like)"),
)

SEEDS = table(
    Operation(
        "own_seed",
        "with torch.random.fork_rng(devices=[]):\n    torch.manual_seed(3)\n    noise = torch.rand(4)\n$o = $v * noise",
        mixes=True,  # the numbers of the mini-batch, and not those that a micro-batch draws
    ),
    Operation("own_generator", "noise = torch.rand(4, generator=torch.Generator().manual_seed(3))\n$o = $v * noise"),
)

KINDS = {"gates": GATES, "python state": PYTHON_STATE, "hooks": HOOKS, "seeds": SEEDS}
# Of a whole case: x is of a subclass of Tensor; the loss function of a step changes; inputs are filled again in place.
TWISTS = ("subclass", "criterion", "reused")
