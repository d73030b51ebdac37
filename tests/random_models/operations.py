"""The operations that random models are made of, as text of Python: what a model of its own would have written.

In the text, `$v` and `$w` are two values that were computed before and `$o` is the one to compute, all [b, t, 4]; `$k`
is the number of the operation, so that names do not meet. `x` [b, t, 4] and `ids` [b, t] are inputs of every model;
`state` [b, 4], `cache` [b, 9, 4], `labels` [b, t], `scale` and `total` (0-dim, the same for all samples) of those
whose operations use them. `$ids`, `$x`, `$scale`: the same inputs where their values are read, of which a pipeline
reads those of the mini-batch. `$sized_ids`, `$sized_x`: where they make a size that is read, which may be that of the
mini-batch or of each micro-batch. A loss goes into `losses`; the line `#: w` behind it is how much it weighs among
micro-batches; or `#: f, value`: it is `f` of that value of the mini-batch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the table."""

    name: str
    forward: str
    init: str = ""
    top: str = ""  # outside the model's class
    inputs: tuple[str, ...] = ()  # besides x and ids
    per_part: bool = False  # micro-batches one after the other give another result than the mini-batch
    reads_size: bool = False  # that depends on values of inputs: the mini-batch's, or each micro-batch's own
    is_random: bool = False
    mixes: bool = False  # samples act on each other: as for the mini-batch, or refused
    needs_root: bool = False  # makes no sense in a submodule
    tolerance: float = 1e-4
    weight: int = 2  # how often it is drawn
    change: str = ""  # what the user does before each step, of whose batch `seed` is; `$self` is the module

    @property
    def reads_inputs(self) -> bool:
        """Does it read values of inputs (`$x` is one, `$x.shape` none)?"""
        return any(f"${name}" in self.forward for name in ("ids", "x", "sized_ids", "sized_x"))


_BANK = """
self.register_buffer("bank_$k", torch.zeros(5, 4))
self.register_buffer("place_$k", torch.zeros(1, dtype=torch.long))
"""
_CODES = """
self.register_buffer("codes_$k", torch.randn(3, 4))
self.register_buffer("sizes_$k", torch.ones(3))
self.register_buffer("sums_$k", self.codes_$k.clone())
"""
_EXPERTS = """
self.router_$k = nn.Linear(4, 3)
self.experts_$k = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
"""
_ROUTE = """
rows = $v.reshape(-1, 4)
scores, chosen = self.router_$k(rows).softmax(-1).max(-1)
mixed = torch.zeros_like(rows)
"""
_FUNCTION = """
class Turn_$k(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, strength=0.5):
        ctx.strength = strength
        ctx.save_for_backward(value)
        return value.tanh()

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return -ctx.strength * gradient * value.cos(), None
"""
_FUNCTION_WITH_SETUP = """
class Turn_$k(torch.autograd.Function):
    @staticmethod
    def forward(value, strength):
        return value.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        value, ctx.strength = inputs
        ctx.save_for_backward(value)

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return -ctx.strength * gradient * value.cos(), None
"""
LAYER = "self.layer_$k = nn.Linear(4, 4)"
_HEAD = "self.head_$k = nn.Linear(4, 3)"


def table(*rows: Operation) -> dict[str, Operation]:
    return {row.name: row for row in rows}


# What the operations of `tests/test_random_models.py` have always been: tensors, views, writes, buffers.
PLAIN = table(
    Operation("linear", "$o = self.layer_$k($v * 1)", LAYER, weight=6),
    Operation("frozen", "$o = self.layer_$k($v * 1)", "self.layer_$k = nn.Linear(4, 4).requires_grad_(False)"),
    Operation("tied", "$o = self.tied($v * 1)", needs_root=True),
    Operation("relu", "$o = torch.relu($v) * 1"),
    Operation("relu_", "$o = $v.relu_()"),
    Operation("add", "$o = $v + $w"),
    Operation("add_", "$v += $w\n$o = $v"),
    Operation("mul_", "$o = $v.mul_(0.5)"),
    Operation("cat", "$o = torch.cat([$v, $w], -1)[..., 2:6]"),
    Operation("view", "$o = $v.reshape($v.shape[0], -1, 2, 2).view($v.shape[0], -1, 4)"),
    Operation("transpose", "$o = $v.transpose(0, 2)[[1, 0, 3, 2]].transpose(0, 2)"),
    Operation("transpose_twice", "$o = $v.transpose(1, 2).transpose(1, 2)"),
    Operation("chunk", "first, second = $v.chunk(2, -1)\n$o = torch.cat([second, first * 2], -1)"),
    Operation("norm", "$o = self.norm_$k($v * 1)", "self.norm_$k = nn.LayerNorm(4)"),
    Operation("embedding", "$o = $v + self.embedding_$k(ids)", "self.embedding_$k = nn.Embedding(3, 4)"),
    Operation("unused", "self.layer_$k($v * 1)\n$o = $v", LAYER),
    Operation("detach", "$o = $v.detach()"),
    Operation(
        "count",
        "self.count_$k.add_(1)\n$o = $v + self.count_$k.clone()",
        'self.register_buffer("count_$k", torch.zeros(()))',
        per_part=True,
    ),
    Operation(
        "average",
        "self.average_$k.mul_(0.5).add_($v.detach().mean((0, 1)))\n$o = $v - self.average_$k.clone()",
        'self.register_buffer("average_$k", torch.ones(4))',
        per_part=True,
    ),
    Operation(
        "keep",
        "$o = $v + self.kept_$k\nself.kept_$k = $w.detach().mean((0, 1))",
        'self.register_buffer("kept_$k", torch.zeros(4))',
        per_part=True,
    ),
    Operation("size", "$o = $v / $v.new_ones(x.shape[0], 1, 1).sum(1, keepdim=True) + x.shape[2]"),
    Operation("mask", "$o = $v * (ids > 0)[..., None] + ids[..., None]"),
    Operation("slice", "$o = F.pad($v[..., :3], (0, 1))"),
    Operation("slice_", "$v[..., 1] = 0\n$v[..., ::2] += $w[..., 1::2]\n$o = $v"),
    Operation("no_grad", "with torch.no_grad():\n    $o = $w * 2 + $v"),
    Operation("max", "value, index = $v.max(-1)\n$o = $v + value[..., None] * index[..., None]"),
    Operation("dropout", "$o = F.dropout($v * 1, 0.5, self.training)", is_random=True),
    Operation("contiguous", "$o = torch.cat([$v[..., :3].contiguous(), $w[..., :1]], -1)"),
    Operation("out", "outputs.append($v * 2)\n$o = $v", needs_root=True),
)

MODULES = table(
    Operation("lstm", "$o = self.lstm_$k($v)[0]", "self.lstm_$k = nn.LSTM(4, 4, batch_first=True)"),
    Operation("gru_state", "$o = $v + self.gru_$k($v)[1][0][:, None]", "self.gru_$k = nn.GRU(4, 4, batch_first=True)"),
    Operation(
        "batch_norm",
        "$o = self.bn_$k($v.transpose(1, 2)).transpose(1, 2)",
        "self.bn_$k = nn.BatchNorm1d(4)",
        per_part=True,
    ),
    Operation("drop", "$o = self.drop_$k($v)", "self.drop_$k = nn.Dropout(0.3)", is_random=True),
    Operation("noise", "$o = $v + 0.1 * torch.randn_like($v)", is_random=True, weight=1),
    Operation("attention", "$o = F.scaled_dot_product_attention(self.layer_$k($v), $w, $v)", LAYER),
    Operation(
        "encoder",
        "$o = self.encoder_$k($v, src_key_padding_mask=ids == 7)",
        "self.encoder_$k = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)",
        weight=1,
    ),
    Operation("conv", "$o = self.conv_$k($v.mT).mT", "self.conv_$k = nn.Conv1d(4, 4, 3, padding=1)"),
    Operation("shared_twice", "$o = self.layer_$k(torch.tanh(self.layer_$k($v)))", LAYER),
    Operation("checkpoint", "$o = checkpoint(self.layer_$k, $v, use_reentrant=False)", LAYER),
    Operation(
        "checkpoint_function",
        "def block_$k(value):\n    return torch.tanh(self.layer_$k(value)) * 2\n"
        "$o = checkpoint(block_$k, $v, use_reentrant=False)",
        LAYER,
        weight=1,
    ),
    Operation(
        "autocast",
        'with torch.autocast("cpu", torch.bfloat16):\n    $o = self.layer_$k($v)\n$o = $o.float()',
        LAYER,
        tolerance=5e-2,
        weight=1,
    ),
    Operation("vmap", "$o = torch.vmap(lambda sample: sample - sample.mean())($v)", weight=1),
    Operation("spectrum", "$o = torch.fft.irfft(torch.fft.rfft($v), n=4) + $v", weight=1),
    Operation("sort", "$o = $v.sort(-1).values + $v.topk(2, -1).values.sum(-1, keepdim=True)"),
    Operation("leaf", "$o = $v + torch.ones(4).requires_grad_() * 2", weight=1),
    Operation("numbers", "$o = $v + torch.tensor([0.5, 1.0, 1.5, 2.0]) * math.sqrt($v.shape[-1])"),
    Operation("list", "values = [$v * number for number in range(3)]\n$o = torch.stack(values).sum(0)"),
    Operation("walk", "$o = torch.stack([row * 2 for row in $v.unbind(1)], 1)"),
    Operation("unpack", "a, b, c, d = $v.unbind(-1)\n$o = torch.stack([b, a, d, c], -1)"),
    Operation(
        "recurrent",
        "hidden, states = torch.zeros_like($v[:, 0]), []\n"
        "for step in range($v.shape[1]):\n"
        "    hidden = torch.tanh(self.layer_$k(hidden) + $v[:, step])\n"
        "    states.append(hidden)\n"
        "$o = torch.stack(states, 1)",
        LAYER,
        weight=1,
    ),
    Operation("even_length", "$o = $v * 2 if $v.shape[1] % 2 == 0 else $v - 1"),
    Operation("by_length", "$o = self.layer_$k($v) if $v.shape[1] > 3 else $v", LAYER),
    Operation("largest_size", "$o = $v * max(x.shape[1], x.shape[2])"),
    Operation("einsum", '$o = torch.einsum("btd,bsd,bse->bte", $v, $w, $v) * 0.1'),
    Operation("cumulative", "$o = $v.cumsum(1) / torch.arange(1, $v.shape[1] + 1)[:, None]"),
)

FUNCTIONS = table(
    Operation("function", "$o = Turn_$k.apply($v, 0.5)", top=_FUNCTION),
    Operation("function_alias", "$o = turn_$k($v, 0.5)", top=_FUNCTION + "\n\nturn_$k = Turn_$k.apply\n"),
    Operation("function_attribute", "$o = self.turn_$k($v, 0.5)", "self.turn_$k = Turn_$k.apply", _FUNCTION),
    Operation(
        "function_partial",
        "$o = turn_$k($v)",
        top=_FUNCTION.replace("value, strength=0.5", "strength, value").replace(
            "-ctx.strength * gradient * value.cos(), None", "None, -ctx.strength * gradient * value.cos()"
        )
        + "\n\nturn_$k = functools.partial(Turn_$k.apply, 0.5)\n",
    ),
    Operation("function_setup", "$o = Turn_$k.apply($v, 0.5)", top=_FUNCTION_WITH_SETUP),
    Operation(
        "function_setup_alias", "$o = turn_$k($v, 0.5)", top=_FUNCTION_WITH_SETUP + "\n\nturn_$k = Turn_$k.apply\n"
    ),
    Operation(
        "function_of_two",
        "$o, other = Pair_$k.apply($v, $w)\n$o = $o + other",
        top="""
class Pair_$k(torch.autograd.Function):
    @staticmethod
    def forward(ctx, one, two):
        return one * 2, two + 1

    @staticmethod
    def backward(ctx, one, two):
        return one * 3, two * 4
""",
    ),
    Operation("straight_through", "$o = $v + ($v.round() - $v).detach()"),
    Operation(
        "straight_through_hard", "soft = $v.softmax(-1)\n$o = soft + (F.one_hot(soft.argmax(-1), 4) - soft).detach()"
    ),
)

STATE = table(
    Operation(
        "bank",
        "place = int(self.place_$k)\n"
        "self.bank_$k[place] = $v.detach().mean((0, 1))\n"
        "self.place_$k[0] = (place + 1) % 5\n"
        "$o = $v + self.bank_$k.mean(0)",
        _BANK,
        per_part=True,
        weight=4,
    ),
    Operation(
        "bank_by_tensor",
        "self.bank_$k[self.place_$k] = $v.detach().mean((0, 1))\n"
        "self.place_$k.add_(1).remainder_(5)\n"
        "$o = $v + self.bank_$k.mean(0)",
        _BANK,
        per_part=True,
    ),
    Operation(
        "bank_when_full",
        "self.bank_$k[self.place_$k.item() % 5] = $v.detach().mean((0, 1))\n"
        "self.place_$k += 1\n"
        "$o = $v - self.bank_$k.mean(0) if self.place_$k >= 5 else $v",
        _BANK,
        per_part=True,
    ),
    Operation(
        "codebook",
        "rows = $v.reshape(-1, 4)\n"
        "chosen = torch.cdist(rows.detach(), self.codes_$k).argmin(-1)\n"
        "if self.training:\n"
        "    hot = F.one_hot(chosen, 3).type_as(rows)\n"
        "    self.sizes_$k.mul_(0.9).add_(hot.sum(0), alpha=0.1)\n"
        "    self.sums_$k.mul_(0.9).add_(hot.T @ rows.detach(), alpha=0.1)\n"
        "    self.codes_$k.copy_(self.sums_$k / self.sizes_$k.clamp(min=1e-3)[:, None])\n"
        "code = F.embedding(chosen, self.codes_$k).view_as($v)\n"
        "$o = $v + (code - $v).detach()",
        _CODES,
        per_part=True,
    ),
    Operation(
        "codebook_restart",
        "rows = $v.reshape(-1, 4)\n"
        "chosen = torch.cdist(rows.detach(), self.codes_$k).argmin(-1)\n"
        "counts = torch.bincount(chosen, minlength=3)\n"
        "if self.training:\n"
        "    self.sizes_$k.mul_(0.5).add_(counts, alpha=0.5)\n"
        "    if (self.sizes_$k < 0.4).any():\n"
        "        self.codes_$k[self.sizes_$k < 0.4] = rows.detach()[0]\n"
        "$o = $v + self.codes_$k[chosen].view_as($v)",
        _CODES,
        per_part=True,
    ),
    Operation("seen", "self.seen_$k = $v.detach()\n$o = $v * 1", "self.seen_$k = None", per_part=True),
    Operation("seen_new", "self.seen_$k = $v.detach()\n$o = $v * 1", per_part=True),
    Operation("seen_attached", "self.seen_$k = $v * 2\n$o = $v * 1", "self.seen_$k = None", per_part=True, weight=1),
    Operation(
        "statistics", "self.mean_$k = $v.mean((1, 2), keepdim=True).detach()\n$o = $v - self.mean_$k", per_part=True
    ),
    Operation(
        "previous",
        "$o = $v if self.previous_$k is None else $v + self.previous_$k\nself.previous_$k = $v.detach().mean((0, 1))",
        "self.previous_$k = None",
        per_part=True,
    ),
    Operation(
        "lazy_buffer",
        "if self.lazy_$k.numel() == 0:\n    self.lazy_$k = torch.zeros($v.shape[-1])\n$o = $v + self.lazy_$k",
        'self.register_buffer("lazy_$k", torch.empty(0))',
    ),
    Operation(
        "lazy_observer",
        "lowest = $v.detach().amin((0, 1))\n"
        "if self.lazy_$k.numel() == 0:\n"
        "    self.lazy_$k.resize_(lowest.shape)\n"
        "    self.lazy_$k.copy_(lowest)\n"
        "else:\n"
        "    self.lazy_$k.copy_(torch.minimum(self.lazy_$k, lowest))\n"
        "$o = $v - self.lazy_$k",
        'self.register_buffer("lazy_$k", torch.empty(0))',
        per_part=True,
    ),
    Operation(
        "lazy_registered",
        'if not hasattr(self, "lazy_$k"):\n    self.register_buffer("lazy_$k", torch.ones($v.shape[-1]))\n'
        "$o = $v * self.lazy_$k",
    ),
    Operation(
        "lazy_attribute",
        "if self.width_$k is None:\n    self.width_$k = $v.shape[-1]\n$o = $v / self.width_$k",
        "self.width_$k = None",
    ),
    Operation(
        "lazy_length",
        "if self.length_$k is None:\n    self.length_$k = $v.shape[1]\n$o = $v / self.length_$k",
        "self.length_$k = None",
    ),
    Operation(
        "cached_by_length",
        "if $v.shape[1] not in self.cached_$k:\n"
        "    self.cached_$k[$v.shape[1]] = torch.linspace(0, 1, $v.shape[1])[:, None]\n"
        "$o = $v + self.cached_$k[$v.shape[1]]",
        "self.cached_$k = {}",
    ),
    Operation(
        "cached_longest",
        "if self.cosines_$k is None or self.cosines_$k.shape[0] < $v.shape[1]:\n"
        "    self.cosines_$k = torch.arange($v.shape[1])[:, None].cos()\n"
        "$o = $v * self.cosines_$k[: $v.shape[1]]",
        "self.cosines_$k = None",
    ),
    Operation("counter", "self.calls_$k += 1\n$o = $v * 1", "self.calls_$k = 0", per_part=True, weight=1),
    Operation(
        "counter_read", "self.calls_$k += 1\n$o = $v * self.calls_$k", "self.calls_$k = 0", per_part=True, weight=1
    ),
)

ROUTING = table(
    Operation(
        "experts_where",
        _ROUTE + "for number, expert in enumerate(self.experts_$k):\n"
        "    index = torch.where(chosen == number)[0]\n"
        "    if len(index) == 0:\n"
        "        continue\n"
        "    mixed[index] = expert(rows[index]) * scores[index, None]\n"
        "$o = $v + mixed.view_as($v)",
        _EXPERTS,
        weight=4,
    ),
    Operation(
        "experts_add",
        _ROUTE + "for number, expert in enumerate(self.experts_$k):\n"
        "    (index,) = torch.where(chosen == number)\n"
        "    if index.numel():\n"
        "        mixed.index_add_(0, index, expert(rows[index]) * scores[index, None])\n"
        "$o = $v + mixed.view_as($v)",
        _EXPERTS,
    ),
    Operation(
        "experts_mask",
        _ROUTE + "for number, expert in enumerate(self.experts_$k):\n"
        "    chosen_here = chosen == number\n"
        "    if chosen_here.any():\n"
        "        mixed[chosen_here] = expert(rows[chosen_here])\n"
        "$o = $v + mixed.view_as($v)",
        _EXPERTS,
    ),
    Operation(
        "experts_hit",
        _ROUTE + "for number in chosen.unique():\n"
        "    index = (chosen == number).nonzero().flatten()\n"
        "    mixed[index] = self.experts_$k[number](rows[index])\n"
        "$o = $v + mixed.view_as($v)",
        _EXPERTS,
    ),
    Operation(
        "by_token",
        "$o = $v.clone()\n"
        "for kind in ids.unique().tolist():\n"
        "    $o[ids == kind] = self.experts_$k[kind]($v[ids == kind])",
        "self.experts_$k = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))",
    ),
    Operation(
        "special_tokens",
        "where = (ids == 2).nonzero()\n"
        "$o = $v.clone()\n"
        "if len(where):\n"
        "    $o[where[:, 0], where[:, 1]] = self.special_$k",
        "self.special_$k = nn.Parameter(torch.randn(4))",
    ),
    Operation("chosen_only", "$o = $v.masked_scatter((ids > 0)[..., None], self.layer_$k($v[ids > 0]))", LAYER),
    Operation(
        "clamp_when_large",
        "$o = self.layer_$k($v)\nif ($o.abs() > 1.5).sum().item() > 0:\n    $o = $o.clamp(-1, 1)",
        LAYER,
        per_part=True,
        weight=4,
    ),
    Operation(
        "until_small", "$o = self.layer_$k($v)\nwhile $o.abs().max() > 1:\n    $o = $o / 2", LAYER, per_part=True
    ),
)

WRITES = table(
    Operation("state_copy", "state.copy_($v.detach().mean(1))\n$o = $v + 1", inputs=("state",)),
    Operation("state_add", "state += 1\n$o = $v + state[:, None]", inputs=("state",)),
    Operation("state_read", "$o = $v + state[:, None]\nstate.mul_(0.5).add_($w.detach()[:, 0])", inputs=("state",)),
    Operation(
        "cache_slot", "cache[:, 2] = $v.detach()[:, 0]\n$o = $v + cache.mean(1, keepdim=True)", inputs=("cache",)
    ),
    Operation(
        "cache_length",
        "cache[:, : $v.shape[1]] = $v.detach()\n$o = $v + cache[:, : $v.shape[1]].cumsum(1)",
        inputs=("cache",),
    ),
    Operation("cache_attached", "cache[:, 3] = $v[:, 0]\n$o = $v + cache[:, 3:4]", inputs=("cache",), weight=1),
    Operation("ids_write", "$o = $v * 1\nids[:, 0] = 1", weight=1),
    Operation("scale_write", "$o = $v * scale.clone()\nscale.mul_(0.5)", inputs=("scale",), weight=1),
)

LOSSES = table(
    Operation(
        "loss_mean",
        "losses.append(F.mse_loss(self.head_$k($v), F.one_hot(ids, 3).float()))\n#: x.shape[0]\n$o = $v",
        _HEAD,
        needs_root=True,
    ),
    Operation(
        "loss_padded",
        "losses.append(F.cross_entropy(self.head_$k($v).flatten(0, 1), labels.flatten(), ignore_index=-100))\n"
        "#: (labels != -100).sum()\n$o = $v",
        _HEAD,
        inputs=("labels",),
        needs_root=True,
    ),
    Operation(
        "loss_masked",
        "mask_$k = (labels != -100)[..., None]\n"
        "losses.append((self.head_$k($v).square() * mask_$k).sum() / mask_$k.sum())\n"
        "#: (labels != -100).sum()\n$o = $v",
        _HEAD,
        inputs=("labels",),
        needs_root=True,
    ),
    Operation(
        "loss_counted",
        "kept_$k = labels.flatten() != -100\n"
        "losses.append(F.cross_entropy(self.head_$k($v).flatten(0, 1)[kept_$k], labels.flatten()[kept_$k]))\n"
        "#: (labels != -100).sum()\n$o = $v",
        _HEAD,
        inputs=("labels",),
        needs_root=True,
        weight=1,
    ),
    Operation(
        "loss_total",
        "losses.append(F.cross_entropy(self.head_$k($v).flatten(0, 1), labels.flatten(), reduction='sum') / total)\n"
        "#: sum\n$o = $v",
        _HEAD,
        inputs=("labels", "total"),
        needs_root=True,
    ),
    Operation(
        "loss_router",
        "weights_$k = self.head_$k($v).softmax(-1)\n"
        "losses.append((weights_$k.mean((0, 1)) * F.one_hot(weights_$k.argmax(-1), 3).float().mean((0, 1))).sum())\n"
        "#: (lambda w: (w.mean((0, 1)) * F.one_hot(w.argmax(-1), 3).float().mean((0, 1))).sum(), weights_$k)\n"
        "$o = $v",
        _HEAD,
        needs_root=True,
        mixes=True,
        weight=1,
    ),
    Operation("batch_mean", "$o = $v - $v.mean((0, 1))", mixes=True, weight=1),
)
