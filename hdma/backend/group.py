"""The operations of a group: which are hdma's own, and how each becomes calls of the communicator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from hdma.backend.forwarded import Forwarded, each_as
from hdma.backend.gpu import AnyWork, GpuWork
from hdma.backend.issue import Call
from hdma.backend.options import REDUCED, c10d, now, op_name, options
from hdma.backend.shapes import After, apart, both, changing, check, dense, joined, landing, padded, put, slot, splits
from hdma.backend.work import GroupWork
from hdma.errors import Error, UsageError

# From here on a list is gathered by a broadcast from each rank, straight into the caller's tensors: measured on the
# host, copying them out of one common buffer takes longer than the gathering itself.
_LARGE_NBYTES = 256 << 10


class Group(Forwarded):
    """The process group (up to torch 2.13) or backend (from 2.14 on) "hdma".

    The methods are those that torch.distributed calls, under the names of both. Tensors must be dense, in host memory
    or all on one GPU; those that are not contiguous are copied. Elements count, not shapes. Arguments that cannot be
    right raise `hdma.UsageError`, and the group stays usable; other errors of hdma end it. `opts` of None means
    asynchronous, with the group's time-out.
    """

    # AllGather and ReduceScatter of one tensor: what FSDP calls, kept short.

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> AnyWork | None:
        """output[r] = input of rank r, as a concatenation or a stack; any dtype."""
        comm = self._at_once(opts)
        if comm is not None and output.is_contiguous() and input.is_contiguous():
            self._history.begin("all_gather", input)
            try:
                comm.all_gather(output, input)
            except Error as error:
                raise self.explain(error) from error.__cause__
            self._history.end()
            return None
        out, after = landing(output)
        inp = dense(input)
        return self._issue("all_gather", inp, [_gather(out, inp)], [output], opts, after)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> AnyWork | None:
        """output = the sum (or opts.reduceOp) over ranks of this rank's part of input."""
        comm, op = self._at_once(opts), op_name(opts)
        if op is None or input.dtype not in REDUCED:
            return self._forward_reduce_scatter(output, input, opts)
        if comm is not None and output.is_contiguous() and input.is_contiguous():
            self._history.begin("reduce_scatter", input)
            try:
                comm.reduce_scatter(output, input, op)
            except Error as error:
                raise self.explain(error) from error.__cause__
            self._history.end()
            return None
        out, after = landing(output)
        inp = dense(input)
        return self._issue("reduce_scatter", inp, [_scatter(out, inp, op)], [output], opts, after)

    # Several tensors in one operation

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> AnyWork:
        """all_gather_single for each pair."""
        _check_pairs("all_gather_coalesced", outputs, inputs, outputs, inputs, self._me.size)
        landings = [landing(output) for output in outputs]
        calls = [_gather(out, dense(inp)) for (out, _), inp in zip(landings, inputs)]
        first = inputs[0] if inputs else None
        return self._issue(
            f"all_gather of {len(calls)}", first, calls, outputs, opts, both(*(after for _, after in landings))
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> AnyWork:
        """reduce_scatter_single for each pair."""
        _check_pairs("reduce_scatter_coalesced", outputs, inputs, inputs, outputs, self._me.size)
        op = op_name(opts)
        if op is None or any(inp.dtype not in REDUCED for inp in inputs):
            works = [self._forward_reduce_scatter(output, inp, opts) for output, inp in zip(outputs, inputs)]
            return self._together(works, outputs)
        landings = [landing(output) for output in outputs]
        calls = [_scatter(out, dense(inp), op) for (out, _), inp in zip(landings, inputs)]
        first = inputs[0] if inputs else None
        return self._issue(
            f"reduce_scatter of {len(calls)}", first, calls, outputs, opts, both(*(after for _, after in landings))
        )

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> AnyWork:
        """allreduce of each tensor."""
        return self._all_reduce(f"all_reduce of {len(tensors)}", tensors, opts)

    # Lists: one tensor for each rank

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> AnyWork:
        """output_tensors[0][r] = input_tensors[0] of rank r; the ranks' tensors may differ in shape."""
        if isinstance(input_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        inp, outs = _only("all_gather", input_tensors), _only("all_gather", output_tensors)
        check("all_gather", inp)
        longest, mine = slot("all_gather", outs, inp.dtype, self._me.size), outs[self._me.rank].numel()
        if mine != inp.numel():
            raise UsageError(
                f"all_gather: output {self._me.rank} (this rank's) has {mine} elements, but the input {inp.numel()}"
            )
        opts = options(opts, timeout)
        if longest * inp.element_size() < _LARGE_NBYTES:
            flat, after = apart(outs, longest)
            return self._issue("all_gather", inp, [_gather(flat, padded(inp, longest))], outs, opts, after)
        landings = [landing(out) for out in outs]
        put(dense(inp), landings[self._me.rank][0])
        calls = [_spread(out, root) for root, (out, _) in enumerate(landings)]
        return self._issue("all_gather", inp, calls, outs, opts, both(*(after for _, after in landings)))

    def allgather_coalesced(self, output_lists: Any, input_list: Sequence[Tensor], opts: Any = None) -> AnyWork:
        """output_lists[r][i] = input_list[i] of rank r."""
        works = [self.allgather([list(outs)], [inp], opts) for outs, inp in zip(zip(*output_lists), input_list)]
        return self._together(works, [out for outs in output_lists for out in outs])

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        op: Any = None,
    ) -> AnyWork:
        """output_tensors[0] = the sum over ranks of input_tensors[0][this rank]; the parts may differ in shape."""
        if isinstance(output_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        out, inputs = _only("reduce_scatter", output_tensors), _only("reduce_scatter", input_tensors)
        opts = options(opts, timeout, op, c10d.ReduceScatterOptions)
        check("reduce_scatter", out)
        longest, mine = slot("reduce_scatter", inputs, out.dtype, self._me.size), inputs[self._me.rank].numel()
        if mine != out.numel():
            raise UsageError(
                f"reduce_scatter: input {self._me.rank} (this rank's) has {mine} elements, but the output {out.numel()}"
            )
        name = op_name(opts)
        if name is None or out.dtype not in REDUCED:
            landed, after = landing(out)
            dense_inputs = [dense(each) for each in inputs]
            return self._forward(
                "reduce_scatter", out, lambda g: g.reduce_scatter([landed], [dense_inputs], opts), [out], after
            )
        flat = joined(inputs, longest)
        landed, after = landing(out)
        if out.numel() < longest:
            landed = out.new_empty(longest, requires_grad=False)
            after = lambda: put(landed[: out.numel()], out)  # noqa: E731
        return self._issue("reduce_scatter", out, [_scatter(landed, flat, name)], [out], opts, after)

    def alltoall(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> AnyWork:
        """output_tensors[r] = input_tensors[this rank] of rank r; shapes may differ.

        Sizes are exchanged first, in the calling thread. Raises `UsageError` on all ranks where they do not fit.
        """
        return self._all_to_all("all_to_all", output_tensors, input_tensors, output_tensors, options(opts, timeout))

    # The others

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> AnyWork:
        """tensors[0] = the sum (or opts.reduceOp) over ranks."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        tensor, comm = _only("all_reduce", tensors), self._at_once(opts)
        if comm is not None and tensor.dtype in REDUCED and tensor.layout == torch.strided and tensor.is_contiguous():
            name = op_name(opts)
            if name is not None:
                self._history.begin("all_reduce", tensor)
                try:
                    comm.all_reduce(tensor, name)
                except Error as error:
                    raise self.explain(error) from error.__cause__
                self._history.end()
                return GpuWork(tensors) if tensor.is_cuda else GroupWork(tensors)
        return self._all_reduce("all_reduce", tensors, options(opts, timeout, op, c10d.AllreduceOptions))

    def broadcast(
        self, tensors: Any, opts: Any = None, root: int | None = None, timeout: timedelta | None = None
    ) -> AnyWork:
        """tensors[0] = that of rank opts.rootRank; any dtype."""
        if isinstance(tensors, Tensor):
            tensors, root, opts = [tensors], opts if isinstance(opts, int) else root, None
        tensor = _only("broadcast", tensors)
        root = (0 if opts is None else opts.rootRank) if root is None else root
        check("broadcast", tensor)
        data, after = changing(tensor)
        # Who sends need not copy back.
        after = after if root != self._me.rank else None
        return self._issue("broadcast", data, [_spread(data, root)], [tensor], options(opts, timeout), after)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> AnyWork:
        """Part r of output = part (this rank) of the input of rank r; parts are equal where no sizes are given.

        With sizes, those of all ranks are exchanged first, in the calling thread.
        """
        call, opts = "all_to_all_single", options(opts, timeout)
        check(call, output)
        check(call, input)
        if output_split_sizes or input_split_sizes:
            after: After
            (out, after), inp = landing(output), dense(input)
            outs = splits(call, out, output_split_sizes, self._me.size, "output")
            inputs = splits(call, inp, input_split_sizes, self._me.size, "input")
            return self._all_to_all(call, outs, inputs, [output], opts, after)
        splits(call, input, (), self._me.size, "input")
        (out, after), inp = landing(output), dense(input)
        return self._issue("all_to_all", inp, [_exchange(out, inp)], [output], opts, after)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> AnyWork:
        """Complete after every rank has called it, and what this rank had put on its current stream was over."""
        if torch.cuda.is_initialized():
            self._finish_on_gpu()
        opts = options(opts, timeout, make=c10d.BarrierOptions)
        return self._issue("barrier", None, [lambda c, a: c.barrier(async_op=a)], [], opts)

    # Names of torch up to 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Parts of the above

    def _all_reduce(self, operation: str, tensors: Sequence[Tensor], opts: Any) -> AnyWork:
        op = op_name(opts)
        if op in ("sum", "avg"):
            # As torch.distributed does: a complex sum is that of its parts.
            tensors = [torch.view_as_real(each) if each.is_complex() else each for each in tensors]
        if op is None or any(each.dtype not in REDUCED or each.layout != torch.strided for each in tensors):
            sparse = any(each.layout != torch.strided for each in tensors)
            data, after = (tensors, None) if sparse else each_as(changing, tensors)
            works = [
                self._forward(
                    "all_reduce", each, lambda g: g.allreduce([each], opts or c10d.AllreduceOptions()), [each]
                )
                for each in data
            ]
            return self._together(works, tensors, after)
        data, after = each_as(changing, tensors)
        calls = [_sum(each, op) for each in data]
        return self._issue(operation, data[0] if data else None, calls, tensors, opts, after)

    def _all_to_all(
        self,
        call: str,
        outs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        opts: Any,
        last: After = None,
    ) -> AnyWork:
        size, rank = self._me.size, self._me.rank
        dtype = inputs[0].dtype if inputs else torch.float32
        slot(call, inputs, dtype, size)
        slot(call, outs, dtype, size)
        sizes = torch.tensor([[each.numel() for each in inputs], [each.numel() for each in outs]])
        table = torch.empty(size, 2, size, dtype=sizes.dtype)
        self._issue(f"sizes of {call}", sizes, [_gather(table, sizes)], [], now(opts))
        sent, received = table[:, 0], table[:, 1]
        if not torch.equal(sent, received.T):
            # Seen alike by all ranks, so that all raise and the group stays usable.
            source, target = (int(each) for each in (sent != received.T).nonzero()[0])
            raise UsageError(
                f"{call}: rank {source} sends {int(sent[source, target])} elements to rank {target}, which expects "
                f"{int(received[target, source])} from it (this is rank {rank})"
            )
        longest = int(sent.max())
        (landed, after), flat = apart(outs, longest), joined(inputs, longest)
        return self._issue(call, flat, [_exchange(landed, flat)], outputs, opts, both(after, last))


def _gather(out: Tensor, inp: Tensor) -> Call:
    return lambda comm, async_op: comm.all_gather(out, inp, async_op=async_op)


def _scatter(out: Tensor, inp: Tensor, op: str) -> Call:
    return lambda comm, async_op: comm.reduce_scatter(out, inp, op, async_op=async_op)


def _sum(tensor: Tensor, op: str) -> Call:
    return lambda comm, async_op: comm.all_reduce(tensor, op, async_op=async_op)


def _spread(tensor: Tensor, root: int) -> Call:
    return lambda comm, async_op: comm.broadcast(tensor, root=root, async_op=async_op)


def _exchange(out: Tensor, inp: Tensor) -> Call:
    return lambda comm, async_op: comm.all_to_all(out, inp, async_op=async_op)


def _only(call: str, items: Sequence[Any]) -> Any:
    if len(items) != 1:
        raise UsageError(f"{call}: one tensor (or list) for this rank's one device, not {len(items)}")
    return items[0]


def _check_pairs(
    call: str,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    wholes: Sequence[Tensor],
    parts: Sequence[Tensor],
    size: int,
) -> None:
    """All pairs before the first is issued: the others would wait for the rest of an operation cut short."""
    if len(outputs) != len(inputs):
        raise UsageError(f"{call}: {len(outputs)} outputs but {len(inputs)} inputs")
    for i, (output, inp, whole, part) in enumerate(zip(outputs, inputs, wholes, parts)):
        check(call, output)
        check(call, inp)
        if output.dtype != inp.dtype or whole.numel() != size * part.numel():
            raise UsageError(
                f"{call}: pair {i} is an output of {output.numel()} x {output.dtype} and an input of {inp.numel()} x "
                f"{inp.dtype}: the dtypes must be equal, and one {size} times (the ranks) as long as the other"
            )
