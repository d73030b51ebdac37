"""Functions from a model to a graph of it, as users give them to `tracer=`."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ShapesCollection
from torch.utils import _pytree as pytree


def exporting(*args: Any, **kwargs: Any) -> Callable[[nn.Module], fx.GraphModule]:
    """`torch.export` on these inputs, for any number of samples."""

    def exported(model: nn.Module) -> fx.GraphModule:
        shapes: Any = ShapesCollection()
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                shapes[leaf] = {0: Dim.AUTO}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what forward does that export loses: fxpipe is to say so
            module: Any = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False).module()
        return module

    return exported
