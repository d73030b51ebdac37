"""Nodes in which samples surely act on each other, found from the graph, for outputs that keep the batch.

Values tell by chance: a gate that is zero at first hides what it lets through later, a graph with random numbers of
its own cannot be compared, a single sample shows nothing. The graph knows of

- a *statistic*, a reduction over the samples (`h.mean(0)`, `h.t() @ h`), that comes back to each of them, as in
  `h - h.mean(0)`;
- a function along the dimension that holds the samples: `h.softmax(0)`, `h.cumsum(0)`, attention over them;
- products of all samples with all that are summed up again: `(h @ h.t()).softmax(-1) @ h`.

From there it is followed to the outputs, through functions that surely keep it. Some may take it out again: a
normalisation takes out a shift or a scale that is one number for all it normalises, a difference or a quotient what
both sides have, a mask, an index or a function that is not known here whatever they like. Behind these the walk says
nothing, and values decide (`verify.batch_independence`). Nor does it where forward keeps a statistic in a buffer: that
is batch norm written out, which sees micro-batches. A write to a part of a value leaves the rest of it what it was
(`constant_regions`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from fxpipe.errors import ArgumentError
from fxpipe.tracing.node_arguments import named_arguments
from fxpipe.tracing.node_info import info
from fxpipe.tracing.shapes.batch_reductions import base_opname, goes_along_samples
from fxpipe.tracing.shapes.constant_regions import ConstantRegions
from fxpipe.tracing.traced import Traced, runs_python
from fxpipe.tracing.verify.effects import Effects

_SUMS = frozenset("add radd sub rsub subtract".split())
_PRODUCTS = frozenset("mul rmul multiply div divide true_divide truediv rtruediv rdiv".split())
_CANCELLING = frozenset("sub rsub subtract div divide true_divide truediv rtruediv rdiv".split())
_REDUCTIONS = frozenset(
    "sum nansum mean nanmean amax amin max min var std var_mean std_mean norm vector_norm logsumexp".split()
)
_ALONG = frozenset("softmax log_softmax softmin cumsum cumprod logcumsumexp normalize sort".split())
_PRODUCTS_OF_MATRICES = frozenset("matmul mm bmm".split())
_MAPS = frozenset("linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d".split())
_NORMS = frozenset("layer_norm rms_norm group_norm instance_norm softmax log_softmax normalize".split())
_OF_LAST = frozenset("layer_norm rms_norm softmax log_softmax".split())
_ELEMENTWISE = frozenset(
    "relu relu6 gelu silu sigmoid tanh elu selu celu leaky_relu prelu softplus mish hardswish hardsigmoid logsigmoid "
    "exp expm1 log log1p log2 log10 sqrt rsqrt reciprocal abs neg negative square pow sin cos erf clamp clamp_min "
    "dropout alpha_dropout clone detach contiguous to float half double bfloat16 type_as nan_to_num".split()
)
_SHAPING = frozenset(
    "view view_as reshape flatten unflatten squeeze unsqueeze permute transpose t movedim swapaxes expand expand_as "
    "repeat".split()
)
_POOLS = frozenset("avg_pool1d avg_pool2d max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d".split())
_TAKING = frozenset("getitem select narrow".split())
_PARTS = _TAKING | frozenset(
    "chunk split tensor_split unbind index_select gather take take_along_dim masked_select".split()
)
_EXTREMES = frozenset("amax amin max min".split())
_REPLACING = frozenset("zero fill copy".split())  # in place
_OF_SIZES = frozenset(
    "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty".split()
)
_STEPS = frozenset("sign round floor ceil trunc heaviside fix".split())  # of floats, but hardly of the samples
_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div"}


@dataclass(frozen=True, slots=True)
class Mixed:
    """A value of which each sample's part surely depends on other samples."""

    origin: fx.Node  # where they met
    shifts: frozenset[fx.Node] = frozenset()  # what was reduced to what was added to it
    scales: frozenset[fx.Node] = frozenset()  # to what it was multiplied with
    varies: bool = True  # by more than one number for all along the last dimension: no normalisation takes that out
    is_whole: bool = True  # in all of its elements

    @property
    def reductions(self) -> frozenset[fx.Node]:
        return self.shifts | self.scales

    def with_(self, other: Mixed) -> Mixed:
        return Mixed(
            self.origin,
            self.shifts | other.shifts,
            self.scales | other.scales,
            self.varies and other.varies,
            self.is_whole or other.is_whole,
        )


def refuse_mixing(traced: Traced) -> None:
    """Refuses outputs that hold the batch, and in which samples surely act on each other.

    Raises:
        ArgumentError: there is one; names the user's line.
    """
    mixing = _Mixing(traced)
    for place, (output, dim) in enumerate(zip(traced.outputs, traced.out_dims, strict=True)):
        if not isinstance(output, fx.Node) or not isinstance(dim, int) or place in traced.told:
            continue
        origin = mixing.origin_of(output)
        if origin is not None:
            raise mixing_error(traced, place, origin)


def mixing_error(traced: Traced, place: int, origin: fx.Node) -> ArgumentError:
    output = traced.results[place][0]
    return ArgumentError(
        f"output {place} ({output.name}, {info(output).shapes[0]}, made at "
        f"{info(output).source or 'the input'}): samples act on each other at {info(origin).source} "
        f"({origin.name} goes over the samples), so the outputs of micro-batches, put together, are not the "
        "output of the batch. Compute it for each sample by itself (another dimension), or use chunks by "
        "running the micro-batches yourself; say with out_dims how the outputs go together (a dimension, "
        "'stack', 'mean', 'sum') if it is meant for micro-batches, or with in_dims what holds the batch"
    )


def sources_that_meet(traced: Traced) -> dict[fx.Node, fx.Node]:
    """Values that surely depend on samples, and the first function that may go over the samples of each.

    Where forward writes to the memory of one, its samples cannot be told apart behind it: it is left out.
    """
    effects = traced.effects
    assert effects is not None
    written = set().union(*effects.written_classes)
    met = _Mixing(traced).met
    return {source: node for source, node in met.items() if effects.alias[source] not in written}


class _Mixing:
    """One walk over a graph."""

    def __init__(self, traced: Traced):
        assert traced.effects is not None
        self.traced, self.effects = traced, traced.effects
        self.valued, self.live = set[fx.Node](), set[fx.Node]()  # depend on values of samples; as floats that vary
        self.partly = set[fx.Node]()  # of the live ones, those of which some elements may depend on no sample
        self.constants = ConstantRegions(traced, self.effects)
        self.statistics: dict[fx.Node, frozenset[fx.Node]] = {}  # -> of what values they are reductions
        self.reductions: dict[fx.Node, fx.Node] = {}  # such a value -> the node that reduces it
        self.mixed: dict[fx.Node, Mixed] = {}
        self.grams: dict[fx.Node, fx.Node] = {}  # all samples with all -> where they met
        self.met: dict[fx.Node, fx.Node] = {}  # values with a batch -> the first node that goes over their samples
        self.touched = set[fx.Node]()  # samples may have met in these
        self.running = _kept_in_buffers(traced, self.effects)
        for place, node in traced.placeholders.items():
            if traced.in_dims[place] is not None:
                self.valued.add(node)
                if _is_floating(node):
                    self.live.add(node)
        for place, node in enumerate(self.effects.nodes):
            self._visit(node, self.effects.written_classes[place])

    def origin_of(self, output: fx.Node) -> fx.Node | None:
        if output in self.mixed:
            return self.mixed[output].origin
        return self._origin(self.statistics[output]) if output in self.statistics else None

    def _origin(self, reduced: frozenset[fx.Node]) -> fx.Node:
        return self.reductions[min(reduced, key=str)]

    # -- one node ------------------------------------------------------------------------------------------------------

    def _visit(self, node: fx.Node, written: Iterable[int]) -> None:
        sources = node.all_input_nodes
        name = _name(node)
        is_known = not (runs_python(node) or info(node).number is not None or info(node).is_guarded_read)
        if is_known and not self.valued.isdisjoint(sources) and name not in _OF_SIZES:
            self.valued.add(node)
            is_looked_up = node.target is F.embedding or name == "embedding"
            carries = not self.live.isdisjoint(sources) and name not in _STEPS and not _is_times_zero(node, name)
            if _is_floating(node) and (is_looked_up or carries):
                self.live.add(node)
                if not is_looked_up and self._is_partly(name, sources):
                    self.partly.add(node)
                    if name in _PARTS and not _is_from_tuple(node):
                        self.live.discard(node)
        if self.constants.has_writes(node):
            self._look_at_region(node)
        is_touched = not self.touched.isdisjoint(sources)
        if node in self.live:
            self._note_meeting(node, name, sources)
            is_touched = self._follow(node, name, sources) or is_touched
        if is_touched:
            self.touched.add(node)
        changed = set(written)
        if changed:
            self._forget(node, changed, is_touched)

    def _is_partly(self, name: str, sources: list[fx.Node]) -> bool:
        """Returns whether some elements of a value may be constant, as some of its live sources are."""
        partly = [s in self.partly for s in sources if s in self.live]
        if name in _MAPS or (name in _PRODUCTS_OF_MATRICES and len(partly) == 1):
            return False  # elements of all features go into each
        mixes = name in _PRODUCTS or name in _PRODUCTS_OF_MATRICES or name in ("cat", "concat", "stack")
        return any(partly) if mixes else bool(partly) and all(partly)

    def _forget(self, node: fx.Node, changed: set[int], is_touched: bool) -> None:
        """Forgets what is known of nodes whose storage has been written to, as far as it has been."""
        members = [n for n, alias in self.effects.alias.items() if alias in changed and n is not node]
        if is_touched:
            self.touched.update(members)
        if not self.valued.isdisjoint(node.all_input_nodes):
            self.valued.update(members)
        if self.constants.writes_itself(node):
            return
        self._note_write(node, changed)
        mixed = self._mixed_by(node)
        for other in members:
            if self.effects.place.get(other, -1) < self.effects.place[node]:
                self._look_at_region(other)
                self._cover(other, node, mixed)

    def _note_write(self, node: fx.Node, changed: set[int]) -> None:
        """Notes whether what a node writes depends on samples."""
        name, opname = _name(node), base_opname(node)
        target: Any = node.args[0] if node.args else None
        is_setitem = opname == "setitem"
        is_in_place = is_setitem or opname in _IN_PLACE or opname.endswith("_")
        if not is_in_place or not isinstance(target, fx.Node) or changed != {self.effects.alias[target]}:
            self.constants.forget(changed)
            return
        others = [s for s in node.all_input_nodes if s is not target]
        varies = any(s in self.live and s not in self.partly and self._batch_dims(s) for s in others)
        is_live: bool | None
        if is_setitem or name in _REPLACING:
            is_live = varies
        elif name in _SUMS | _PRODUCTS | _ELEMENTWISE:
            is_live = False if _is_times_zero(node, name) else (True if varies and name in _SUMS else None)
        else:
            self.constants.forget(changed)
            return
        root = self.constants.root_of(target)
        root_is_live = None if root in self.partly else root in self.live
        self.constants.write(node, root, is_live, root_is_live)

    def _look_at_region(self, node: fx.Node) -> None:
        """Asks which elements of a value are constant, where parts of its storage have been written to."""
        region, dims = self.constants.region(node), self._batch_dims(node)
        self.live.discard(node)
        self.partly.discard(node)
        if not isinstance(region, torch.Tensor) or not _is_floating(node) or len(dims) > 1:
            return
        samples = _by_sample(region, dims[0]) if dims else region.flatten()[None]
        if not samples.all(1).any():
            self.live.add(node)
            if samples.any():
                self.partly.add(node)

    def _mixed_by(self, node: fx.Node) -> Mixed | None:
        """Tells whether samples have surely met in what a node writes."""
        value = node.args[2] if base_opname(node) == "setitem" else node
        if not isinstance(value, fx.Node):
            return None
        if value in self.statistics and value is not node:
            reductions = self.statistics[value]
            return Mixed(self._origin(reductions), reductions, varies=False)
        return self.mixed.get(value)

    def _cover(self, node: fx.Node, writer: fx.Node, mixed: Mixed | None) -> None:
        """Covers what is known of a value by a write to it, or to a part of it, of what may be mixed."""
        written = self.constants.written(writer, node)
        if isinstance(written, torch.Tensor) and not written.any():
            return
        before = self.mixed.pop(node, None)
        self.statistics.pop(node, None)
        self.grams.pop(node, None)
        if not isinstance(written, torch.Tensor) or node not in self.live or len(dims := self._batch_dims(node)) != 1:
            return
        is_all, has_rest = bool(written.all()), not _by_sample(written, dims[0]).all(1).any()
        if mixed is not None:
            self.mixed[node] = mixed if is_all else replace(mixed, is_whole=False, varies=False)
        elif before is not None and before.is_whole and has_rest:
            self.mixed[node] = replace(before, is_whole=False, varies=False)

    def _follow(self, node: fx.Node, name: str, sources: list[fx.Node]) -> bool:
        """Notes what is sure of a node; returns whether samples meet there."""
        if (meets := self._meet(node, name, sources)) is not None:
            return meets
        known = [s for s in sources if s in self.mixed or s in self.statistics or s in self.grams]
        if not known:
            return False
        if any(s in self.touched and s not in known for s in sources):
            return True
        if any(s in self.grams for s in known):
            self._follow_gram(node, name, sources)
        elif all(s in self.statistics for s in known):
            self._follow_statistic(node, name, sources, known)
        elif len(info(node).shapes) == 1 and len(self._batch_dims(node)) == 1:
            mixed = self._follow_mixed(node, name, sources, known)
            if mixed is not None:
                self.mixed[node] = mixed
        elif all(s in self.mixed for s in known) and name in ("chunk", "split", "unbind", *_ATTENTION_NAMES):
            self.mixed[node] = self._merged(known)
        return True

    # -- nodes in which samples meet -----------------------------------------------------------------------------------

    def _meet(self, node: fx.Node, name: str, sources: list[fx.Node]) -> bool | None:
        """Tells whether samples meet in a node for the first time; None where they do not."""
        tensors = [s for s in sources if info(s).shapes and info(s).number is None]
        if not tensors or any(s in self.touched and s not in self.mixed for s in tensors):
            return None
        source = tensors[0]
        if name in _EXTREMES and source in self.partly:
            return None  # of what may be constant
        if name in _REDUCTIONS and tensors == [source] and source in self.live:
            if len(self._batch_dims(source)) == 1 and not self._batch_dims(node):
                if node in self.running:
                    return False
                self._add_statistic(node, source)
                return True
        elif name in _ALONG and tensors == [source] and source in self.live:
            if len(self._batch_dims(source)) == 1 and goes_along_samples(node):
                self.mixed[node] = self._in_parts(Mixed(node, varies=_last(node) > 1), source)
                return True
        elif node.target in _ATTENTION:
            return self._meet_in_attention(node)
        elif name in _PRODUCTS_OF_MATRICES and all(s in self.live and len(self._batch_dims(s)) == 1 for s in tensors):
            dims = self._batch_dims(node)
            if len(dims) == 2 and dims[1] == len(info(node).shapes[0].shape) - 1:
                self.grams[node] = node
                return True
            if not dims:
                if node in self.running:
                    return False
                self._add_statistic(node, source)
                return True
        return None

    def _note_meeting(self, node: fx.Node, name: str, sources: list[fx.Node]) -> None:
        """Notes values over whose samples a node may go, whatever becomes of it."""
        if node in self.running:
            return
        dims = self._batch_dims(node)
        meets = (name in _REDUCTIONS or name in _PRODUCTS_OF_MATRICES) and not dims
        meets = meets or (name in _PRODUCTS_OF_MATRICES and len(dims) == 2)
        if node.target in _ATTENTION:
            key, value, _, dim = self._attention_arguments(node)
            sources, meets = [key, value], self._batch_dims(key) == [dim] or self._batch_dims(value) == [dim]
        if meets or (name in _ALONG and goes_along_samples(node)):
            for source in sources:
                if source in self.live and len(info(source).shapes) == len(self._batch_dims(source)) == 1:
                    self.met.setdefault(source, node)

    def _add_statistic(self, node: fx.Node, source: fx.Node) -> None:
        """Adds a number that all samples share, which may be taken out again by whatever normalises."""
        if _elements(node) > 1:
            while _name(source) in _ELEMENTWISE | _SHAPING and isinstance(source.args[0], fx.Node):
                source = source.args[0]
            self.statistics[node] = frozenset({source})
            self.reductions.setdefault(source, node)

    def _meet_in_attention(self, node: fx.Node) -> bool | None:
        key, value, masks, dim = self._attention_arguments(node)
        if any(mask is not None for mask in masks) or not {key, value} <= self.live:
            return None
        if self._batch_dims(key) != [dim] or self._batch_dims(value) != [dim]:
            return None
        self.mixed[node] = self._in_parts(Mixed(node, varies=_last(node) > 1), value)
        return True

    def _attention_arguments(self, node: fx.Node) -> tuple[fx.Node, fx.Node, tuple[Any, ...], int]:
        """Key, value, masks, and the dimension over which an attention goes."""
        arguments = named_arguments(node)
        masks: tuple[Any, ...]
        if node.target is F.scaled_dot_product_attention:
            masks, place = (arguments.get("attn_mask"),), -2
        else:
            masks, place = (arguments.get("attn_mask"), arguments.get("key_padding_mask")), 0
        key: fx.Node = arguments["key"]
        return key, arguments["value"], masks, place % len(info(key).shapes[0].shape)

    def _in_parts(self, mixed: Mixed, source: fx.Node) -> Mixed:
        """Samples have met in those elements that depend on samples."""
        return replace(mixed, is_whole=False, varies=False) if source in self.partly else mixed

    # -- statistics and mixed samples, followed on ---------------------------------------------------------------------

    def _follow_statistic(self, node: fx.Node, name: str, sources: list[fx.Node], known: list[fx.Node]) -> None:
        reductions = frozenset[fx.Node]().union(*(self.statistics[s] for s in known))
        others = [s for s in sources if s not in known]
        is_even = all(info(s).number is not None or not self._batch_dims(s) for s in others)
        is_part = name == "getitem" and _is_from_tuple(node)
        if (is_part or name in _SHAPING) and node.args[0] in known:
            self.statistics[node] = reductions
        elif is_even and self.valued.isdisjoint(s for s in others if info(s).number is None):
            keeps = name in _ELEMENTWISE | _MAPS or (name in _SUMS | _PRODUCTS and len(known) == 1)
            if keeps and node.args and node.args[0] in (known if name in _MAPS else sources) and _elements(node) > 1:
                self.statistics[node] = reductions
        elif name in _SUMS | _PRODUCTS and (len(known), len(node.args), len(others)) == (1, 2, 1):
            self._meet_again(node, known[0], name in _SUMS)

    def _meet_again(self, node: fx.Node, statistic: fx.Node, is_sum: bool) -> None:
        """A statistic comes back to the samples."""
        if len(self._batch_dims(node)) != 1:
            return
        reductions, nothing = self.statistics[statistic], frozenset[fx.Node]()
        varies = 1 < _last(statistic) == _last(node)
        shifts, scales = (reductions, nothing) if is_sum else (nothing, reductions)
        self.mixed[node] = self._in_parts(Mixed(self._origin(reductions), shifts, scales, varies), statistic)

    def _follow_gram(self, node: fx.Node, name: str, sources: list[fx.Node]) -> None:
        """Products of all samples with all: scaled, weighed by a softmax, summed up again."""
        gram, *others = sources
        if gram not in self.grams or any(s in self.grams for s in others):
            return
        if name in _PRODUCTS_OF_MATRICES and len(others) == 1 and others[0] in self.live:
            dims = len(info(others[0]).shapes[0].shape)
            if self._batch_dims(others[0]) == [dims - 2] and len(self._batch_dims(node)) == 1:
                self.mixed[node] = self._in_parts(Mixed(self.grams[gram], varies=_last(node) > 1), others[0])
        elif all(info(s).number is None and s not in self.valued for s in others):
            is_scaled = name in _PRODUCTS and node.args and node.args[0] is gram
            if is_scaled or name in ("softmax", "dropout", "to", "float"):
                self.grams[node] = self.grams[gram]

    def _follow_mixed(self, node: fx.Node, name: str, sources: list[fx.Node], known: list[fx.Node]) -> Mixed | None:
        first: Any = node.args[0] if node.args else None
        if name in _SUMS | _PRODUCTS:
            joined = self._joined(name, node, known)
            has_zeros = name in _PRODUCTS and not self.partly.isdisjoint(sources)
            return replace(joined, is_whole=False, varies=False) if joined is not None and has_zeros else joined
        if name in ("cat", "concat", "stack"):
            return self._put_together(node, sources, known)
        if node.target is F.multi_head_attention_forward or node.target is F.scaled_dot_product_attention:
            return self._merged(known) if all(s in self.mixed for s in known) else None
        if name in _PRODUCTS_OF_MATRICES and all(s in self.mixed for s in known):
            merged = self._merged(known)
            is_map = len(known) == 1 and first in known
            return replace(merged, varies=merged.varies or len(known) > 1 or (is_map and bool(merged.shifts)))
        if first not in self.mixed or len(known) > 1:
            return None
        mixed = self.mixed[first]
        if name in _MAPS:
            return replace(mixed, varies=mixed.varies or bool(mixed.shifts), is_whole=True)
        if name in _NORMS or name == "batch_norm":
            return self._normalised(node, name, mixed)
        if name in _ELEMENTWISE or name in _POOLS:
            return mixed
        if name == "masked_fill" or name in ("sum", "mean"):
            keeps = name == "masked_fill" or _keeps_last(node, first)
            return mixed if keeps and mixed.is_whole else None
        if name in _SHAPING:
            keeps = _last(node) == _last(first)
            return replace(mixed, varies=mixed.varies and (keeps or not mixed.reductions))
        if name in _TAKING:
            is_part_of_tuple = _is_from_tuple(node)
            have = [self._batch_sizes(n) for n in (node, first)]
            return mixed if is_part_of_tuple or (mixed.is_whole and have[0] == have[1]) else None
        return None

    def _joined(self, name: str, node: fx.Node, known: list[fx.Node]) -> Mixed | None:
        if len(node.args) != 2 or any(key != "alpha" or value == 0 for key, value in node.kwargs.items()):
            return None
        if len(known) == 1:
            return self.mixed[known[0]]
        statistics = [s for s in known if s in self.statistics]
        mixed = self._merged([s for s in known if s in self.mixed])
        if not statistics:
            one, two = (self.mixed[s] for s in known)
            may_cancel = name in _CANCELLING and (one.origin is two.origin or one.reductions & two.reductions)
            return None if may_cancel else mixed
        reductions = self.statistics[statistics[0]]
        if name in _SUMS:
            return None if reductions & mixed.shifts else replace(mixed, shifts=mixed.shifts | reductions)
        return None if reductions & mixed.scales else replace(mixed, scales=mixed.scales | reductions)

    def _put_together(self, node: fx.Node, sources: list[fx.Node], known: list[fx.Node]) -> Mixed | None:
        tensors = [s for s in sources if info(s).number is None]
        if not all(s in self.mixed for s in known) or any(
            self._batch_sizes(s) != self._batch_sizes(node) for s in tensors
        ):
            return None
        merged = self._merged(known)
        return merged if len(tensors) == len(known) else replace(merged, is_whole=False, varies=False)

    def _normalised(self, node: fx.Node, name: str, mixed: Mixed) -> Mixed | None:
        if name == "batch_norm":
            return None if named_arguments(node).get("training") else mixed
        if not mixed.is_whole or _last(node) <= 1:
            return None
        if not mixed.reductions:
            return mixed if mixed.varies else None
        is_of_last = name in _OF_LAST and (name in ("layer_norm", "rms_norm") or _dim(node) in (-1, _dims(node) - 1))
        return mixed if mixed.varies and is_of_last else None

    def _merged(self, known: list[fx.Node]) -> Mixed:
        merged, *others = (self.mixed[s] for s in known)
        for other in others:
            merged = merged.with_(other)
        return merged

    # -- shapes --------------------------------------------------------------------------------------------------------

    def _batch_dims(self, node: fx.Node) -> list[int]:
        """Dimensions of the first tensor that hold samples."""
        shapes = info(node).shapes
        return [d for d, size in enumerate(shapes[0].shape) if size.free_symbols] if shapes else []

    def _batch_sizes(self, node: fx.Node) -> list[sympy.Expr]:
        shapes = info(node).shapes
        return [size for size in shapes[0].shape if size.free_symbols] if shapes else []


_ATTENTION_NAMES = ("multi_head_attention_forward",)


def _by_sample(elements: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns a row for each sample; one of a vector has a single element."""
    return elements.movedim(dim, 0)[..., None].flatten(1)


def _kept_in_buffers(traced: Traced, effects: Effects) -> set[fx.Node]:
    """Nodes of which forward keeps something in the model."""
    states = {effects.alias[n] for n in traced.graph.nodes if n.op == "get_attr"} - {None}
    todo = [n for n in traced.assigned.values() if isinstance(n, fx.Node)]
    todo += [node for node, classes in zip(effects.nodes, effects.written_classes, strict=True) if classes & states]
    kept = set[fx.Node]()
    while todo:
        node = todo.pop()
        if node not in kept:
            kept.add(node)
            todo.extend(node.all_input_nodes)
    return kept


def _name(node: fx.Node) -> str:
    name = base_opname(node)
    return _IN_PLACE.get(name, name.removesuffix("_"))


def _is_from_tuple(node: fx.Node) -> bool:
    """Returns whether it is taken of something of several tensors."""
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and len(info(source).shapes) > 1


def _is_floating(node: fx.Node) -> bool:
    shapes = info(node).shapes
    return bool(shapes) and bool(shapes[0].dtype.is_floating_point)


def _is_times_zero(node: fx.Node, name: str) -> bool:
    return name in ("mul", "rmul", "multiply") and any(
        isinstance(arg, (int, float)) and arg == 0 for arg in (*node.args, *node.kwargs.values())
    )


def _elements(node: fx.Node) -> float:
    """Counts the elements of one sample."""
    return float(sympy.Mul(*(size for size in info(node).shapes[0].shape if size.is_number)))


def _last(node: Any) -> float:
    """The size of the last dimension; 1 where that holds samples."""
    shape = info(node).shapes[0].shape
    return float(shape[-1]) if shape and shape[-1].is_number else 1.0


def _dims(node: fx.Node) -> int:
    return len(info(node).shapes[0].shape)


def _dim(node: fx.Node) -> Any:
    return node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)


def _keeps_last(node: fx.Node, source: Any) -> bool:
    """Returns whether a sum leaves the last dimension alone."""
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    return all(isinstance(d, int) and d % _dims(source) != _dims(source) - 1 for d in dims)
