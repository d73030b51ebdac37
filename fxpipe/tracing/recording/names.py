"""What recording goes by: names of functions and attributes, and kinds of values."""

from __future__ import annotations

import torch

# Answers that are the same for every run of one graph, or text for people: they run and leave no node.
_FREE = frozenset(
    "dense_dim sparse_dim dim_order cudnn_is_acceptable dim ndimension is_floating_point is_complex is_signed "
    "element_size is_contiguous storage_offset data_ptr get_device __hash__ untyped_storage can_cast __dir__ "
    "result_type promote_types is_storage is_inference __dlpack_device__ has_names get_default_device "
    "is_same_size is_tensor is_grad_enabled "
    "is_autocast_enabled get_autocast_dtype get_default_dtype".split()
)
_STATES = frozenset("_set_grad_enabled _enter_autocast _exit_autocast".split())  # kept by ThreadState
# Functions that tell the values of a tensor.
READS = frozenset(
    "item tolist numpy __array__ __bool__ __int__ __float__ __index__ __complex__ __contains__ is_nonzero equal "
    "allclose".split()
)
# Functions that give as many tensors as a dimension is long, or as many pieces of it; and where that one is given.
IN_PIECES = {"__iter__": 1, "unbind": 1, "split": 2, "chunk": 2, "unsafe_split": 2, "unsafe_chunk": 2}
TEXTS = frozenset("__repr__ __format__ __str__".split())
TENSOR_ATTRIBUTES = frozenset("data T mT H mH real imag _base".split())  # the other attributes are no tensors
OF_GRADIENTS = frozenset("requires_grad is_leaf grad_fn".split())
# Kinds of values: those that count by their value, and further ones that are arguments of a node as they are.
PLAIN = (bool, int, float, complex, str)
CONSTANTS = (type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format)


def leaves_no_node(name: str) -> bool:
    """Does a function of this name simply run?"""
    return name in _FREE or name in _STATES or (name.startswith("is_") and name != "is_nonzero")
