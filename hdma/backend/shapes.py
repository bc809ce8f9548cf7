"""Tensors of any form as the flat, contiguous ones that the communicator takes, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hdma.errors import UsageError

After = Callable[[], None] | None


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where it is plain contiguous memory, else a copy."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def landing(out: torch.Tensor) -> tuple[torch.Tensor, After]:
    """Contiguous memory for a result of `out`'s shape, and what brings it to `out` (None: it is there)."""
    if out.is_contiguous() and not (out.is_conj() or out.is_neg()):
        return out, None
    temporary = torch.empty_like(out, memory_format=torch.contiguous_format, requires_grad=False)
    return temporary, lambda: put(temporary, out)


def changing(tensor: torch.Tensor) -> tuple[torch.Tensor, After]:
    """The same for a tensor that is input and output."""
    copy = dense(tensor)
    return copy, None if copy is tensor else lambda: put(copy, tensor)


def put(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies elements in order, whatever the two shapes."""
    shape = target.shape
    (target.detach() if target.requires_grad else target).copy_(source if source.shape == shape else source.view(shape))


def both(*steps: After) -> After:
    """All steps as one; None if there are none."""
    real = [step for step in steps if step is not None]
    if len(real) < 2:
        return real[0] if real else None

    def after() -> None:
        for step in real:
            step()

    return after


def slot(call: str, tensors: Sequence[torch.Tensor], dtype: torch.dtype, size: int) -> int:
    """The elements of the largest of `size` tensors of one dtype. Raises `UsageError` for other lists."""
    if len(tensors) != size:
        raise UsageError(f"{call}: the list must have {size} tensors, one for each rank, but has {len(tensors)}")
    for rank, tensor in enumerate(tensors):
        check(call, tensor)
        if tensor.dtype != dtype:
            raise UsageError(f"{call}: tensor {rank} of the list is {tensor.dtype}, but another tensor is {dtype}")
    return max(int(tensor.numel()) for tensor in tensors)


def check(call: str, tensor: torch.Tensor) -> None:
    """Raises `UsageError` for what is not dense memory of the host or a GPU."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(f"{call}: a tensor is on {tensor.device}: hdma moves memory of the host and of GPUs")
    if tensor.layout != torch.strided:
        raise UsageError(f"{call}: a tensor has layout {tensor.layout}: pass a dense one")


def joined(tensors: Sequence[torch.Tensor], slot: int) -> torch.Tensor:
    """Tensors one after another, each in `slot` elements: a view where they lie so, else a copy."""
    view = _as_one(tensors, slot)
    if view is not None:
        return view
    flat = tensors[0].new_empty(len(tensors) * slot)
    for i, tensor in enumerate(tensors):
        flat[i * slot : i * slot + tensor.numel()] = tensor.detach().reshape(-1)
        # Padding is moved and may be reduced: no uninitialised memory.
        flat[i * slot + tensor.numel() : (i + 1) * slot] = 0
    return flat


def apart(tensors: Sequence[torch.Tensor], slot: int) -> tuple[torch.Tensor, After]:
    """Memory for results that belong in `tensors`, each in `slot` elements, and what brings them there."""
    view = _as_one(tensors, slot)
    if view is not None:
        return view, None
    flat = tensors[0].new_empty(len(tensors) * slot)

    def after() -> None:
        for tensor, part in zip(tensors, flat.view(len(tensors), slot).unbind()):
            put(part if tensor.numel() == slot else part[: tensor.numel()], tensor)

    return flat, after


def padded(tensor: torch.Tensor, slot: int) -> torch.Tensor:
    """The tensor, contiguous, in `slot` elements."""
    return joined([tensor], slot) if tensor.numel() < slot else dense(tensor)


def _as_one(tensors: Sequence[torch.Tensor], slot: int) -> torch.Tensor | None:
    first = tensors[0]
    storage = first.untyped_storage().data_ptr()
    for i, tensor in enumerate(tensors):
        if (
            tensor.numel() != slot
            or not tensor.is_contiguous()
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.untyped_storage().data_ptr() != storage
            or tensor.storage_offset() != first.storage_offset() + i * slot
        ):
            return None
    return first.detach().as_strided((len(tensors) * slot,), (1,), first.storage_offset())


def splits(call: str, tensor: torch.Tensor, sizes: Sequence[int], ranks: int, name: str) -> list[torch.Tensor]:
    """The parts of `tensor` along its first dimension, by `sizes` (none: equal). Raises `UsageError` if they misfit."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % ranks:
            raise UsageError(
                f"{call}: the first dimension of {name}, {rows}, is not a multiple of the {ranks} ranks: pass "
                f"{name}_split_sizes"
            )
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise UsageError(
            f"{call}: {name}_split_sizes must be {ranks} numbers (one for each rank) whose sum is {rows}, the first "
            f"dimension of {name}, but is {list(sizes)}"
        )
    return list(tensor.split(list(sizes))) if tensor.dim() else [tensor]
