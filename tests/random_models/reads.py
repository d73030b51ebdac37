"""Operations that read a number from a tensor: each way to read, of each kind of tensor, for each use.

A name is `read_SOURCE_READER_USE`, say `read_hidden_item_branch`.
"""

from dataclasses import dataclass

from random_models.operations import Operation


@dataclass(frozen=True, slots=True)
class Source:
    """Makes `tensor_$k`, a 0-dim whole number from 0 to 3."""

    text: str
    init: str = ""
    after: str = ""
    inputs: tuple[str, ...] = ()
    per_part: bool = False
    reads_size: bool = False


SOURCES = {
    "input": Source("tensor_$k = $ids.max()"),
    "mask": Source("tensor_$k = ($x[..., 0] > 0.5).any(1).sum() % 4"),
    "scalar": Source("tensor_$k = $scale.long()", inputs=("scale",)),
    "parameter": Source(
        "tensor_$k = (self.parameter_$k.detach() > 0).sum().clamp(max=3)",
        "self.parameter_$k = nn.Parameter(torch.randn(4) * 0.02)",
        "$o = $o + self.parameter_$k",
    ),
    "fixed": Source("tensor_$k = self.fixed_$k", 'self.register_buffer("fixed_$k", torch.tensor(2))'),
    "changing": Source(
        "tensor_$k = self.changing_$k.clone()",
        'self.register_buffer("changing_$k", torch.zeros((), dtype=torch.long))',
        "self.changing_$k.copy_((self.changing_$k + 1) % 4)",
        per_part=True,
    ),
    "in_training": Source(
        "tensor_$k = self.changing_$k.clone()",
        'self.register_buffer("changing_$k", torch.zeros((), dtype=torch.long))',
        "if self.training:\n    self.changing_$k.copy_((self.changing_$k + 1) % 4)",
        per_part=True,
    ),
    "hidden": Source(
        "tensor_$k = (self.gate_$k($v)[..., 0] > 0.2).sum() % 4", "self.gate_$k = nn.Linear(4, 1)", per_part=True
    ),
    "found": Source(
        "tensor_$k = torch.tensor(torch.nonzero(self.gate_$k($v)[..., 0] > 0.2).shape[0] % 4)",
        "self.gate_$k = nn.Linear(4, 1)",
        per_part=True,
    ),
    "rows": Source(
        "tensor_$k = torch.tensor(len(torch.where(self.gate_$k($v)[..., 0] > 0.2)[0]) % 4)",
        "self.gate_$k = nn.Linear(4, 1)",
        per_part=True,
    ),
    "kinds": Source("tensor_$k = torch.tensor(len($sized_ids.unique()))", reads_size=True),
}

SIZES = ("length", "repeat", "size")  # the readers that make a tensor of that size first
READERS = {
    "int": "number = int(tensor_$k)",
    "item": "number = tensor_$k.item()",
    "float": "number = int(float(tensor_$k))",
    "bool": "number = int(bool(tensor_$k > 1)) + 2 * bool(tensor_$k)",
    "compare": "number = 3 if tensor_$k > 1 else 1",
    "equal": "number = 2 if tensor_$k == 1 else 0",
    "tolist": "number = tensor_$k[None].tolist()[0]",
    "iter": "for row in tensor_$k[None]:\n    number = int(row)",
    "unpack": "number, other = torch.stack([tensor_$k, tensor_$k]).tolist()",
    "index": "number = operator.index(tensor_$k)",
    "numpy": "number = int(tensor_$k.numpy())",
    "format": 'number = int(f"{tensor_$k}")',
    "range": "number = len(range(tensor_$k))",
    "slice": "number = [0, 1, 2, 3][tensor_$k]",
    "length": "number = len(torch.ones(8)[torch.arange(8) < tensor_$k])",
    "repeat": "number = len(torch.ones(1).repeat_interleave(tensor_$k))",
    "size": "number = torch.nonzero(torch.arange(8) < tensor_$k).shape[0]",
}

USES = {
    "branch": ("$o = $v * 2 if number > 1 else $v - 1", ""),
    "layer": ("$o = self.layer_$k($v) if number > 1 else $v", "self.layer_$k = nn.Linear(4, 4)"),
    "index": ("$o = $v + self.table_$k[number]", "self.table_$k = nn.Parameter(torch.randn(4, 4))"),
    "slice": ("$o = $v + $w[..., : number + 1].sum(-1, keepdim=True)", ""),
    "size": ("$o = $v + torch.ones(number + 1).sum()", ""),
    "factor": ("$o = $v * (0.5 + 0.25 * number)", ""),
    "loop": (
        "$o = $v\nfor _ in range(number):\n    $o = torch.tanh(self.layer_$k($o))",
        "self.layer_$k = nn.Linear(4, 4)",
    ),
    "module": ("$o = self.layers_$k[number]($v)", "self.layers_$k = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))"),
    "write": ("$o = $v.clone()\n$o[..., number] = 0", ""),
}


def read(name: str) -> Operation:
    """The operation of that name."""
    source, reader, use = name.removeprefix("read_").rsplit("_", 2)
    of, (text, init) = SOURCES[source], USES[use]
    is_size = of.reads_size or (reader in SIZES and source in ("input", "mask"))
    made = of.text.replace("$ids", "$sized_ids").replace("$x", "$sized_x") if is_size else of.text
    return Operation(
        name,
        "\n".join(filter(None, (made, READERS[reader], text, of.after))),
        "\n".join(filter(None, (of.init, init))),
        inputs=of.inputs,
        per_part=of.per_part or is_size,
        reads_size=is_size,
    )


READS = {name: read(name) for name in (f"read_{s}_{r}_{u}" for s in SOURCES for r in READERS for u in USES)}
