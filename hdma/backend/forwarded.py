"""The operations that are gloo's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from hdma.backend.gpu import AnyWork
from hdma.backend.issue import UNSET, Issue
from hdma.backend.options import c10d
from hdma.backend.shapes import After, both, changing, check, dense, landing


class Forwarded(Issue):
    """A group with the operations that hdma leaves to gloo; tensors with gaps are copied, for which gloo is wrong."""

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> AnyWork:
        """tensors[0] of rank opts.rootRank = the sum over ranks; by gloo."""
        data, after = each_as(changing, tensors)
        return self._forward("reduce", tensors[0], lambda g: g.reduce(data, opts), tensors, after)

    def gather(self, output_tensors: Any, input_tensors: Sequence[Tensor], opts: Any) -> AnyWork:
        """output_tensors[0][r] of rank opts.rootRank = input_tensors[0] of rank r; by gloo."""
        outs = list(output_tensors[0]) if output_tensors else []
        landed, after = each_as(landing, outs)
        inputs = [dense(each) for each in input_tensors]
        run: Callable[[Any], Any] = lambda g: g.gather([landed] if outs else [], inputs, opts)  # noqa: E731
        return self._forward("gather", input_tensors[0], run, outs, after)

    def scatter(self, output_tensors: Sequence[Tensor], input_tensors: Any, opts: Any) -> AnyWork:
        """output_tensors[0] = input_tensors[0][this rank] of rank opts.rootRank; by gloo."""
        landed, after = each_as(landing, output_tensors)
        inputs = [[dense(each) for each in parts] for parts in input_tensors]
        return self._forward(
            "scatter", output_tensors[0], lambda g: g.scatter(landed, inputs, opts), output_tensors, after
        )

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> AnyWork:
        """Sends tensors[0] to rank `dst` of the group; by gloo."""
        data = [dense(each) for each in tensors]
        return self._forward(f"send to {dst}", data[0], lambda g: g.send(data, dst, tag), tensors)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> AnyWork:
        """Receives tensors[0] from rank `src` of the group; by gloo."""
        landed, after = each_as(landing, tensors)
        return self._forward(f"recv from {src}", tensors[0], lambda g: g.recv(landed, src, tag), tensors, after)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> AnyWork:
        """Receives tensors[0] from any rank of the group, which `source_rank()` of the work tells; by gloo."""
        landed, after = each_as(landing, tensors)
        return self._forward("recv", tensors[0], lambda g: g.recv_anysource(landed, tag), tensors, after)

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks which did not come in time; by gloo. Reached from torch 2.14 on."""
        asked = getattr(opts, "timeout", opts)
        limit = timedelta(seconds=self._timeout_s) if asked in (None, UNSET) else asked
        (self._inner or self._make_inner()).monitored_barrier(limit, wait_all_ranks)

    def _forward_reduce_scatter(self, output: Tensor, input: Tensor, opts: Any) -> AnyWork:
        check("reduce_scatter", input)
        (out, after), inp = landing(output), dense(input)
        opts = opts or c10d.ReduceScatterOptions()

        def call(inner: Any) -> Any:
            by_name = getattr(inner, "reduce_scatter_single", None) or inner._reduce_scatter_base
            return by_name(out, inp, opts)

        return self._forward("reduce_scatter", inp, call, [output], after)


def each_as(form: Callable[[Tensor], tuple[Tensor, After]], tensors: Sequence[Tensor]) -> tuple[list[Tensor], After]:
    """`form` (landing or changing) of each tensor."""
    for tensor in tensors:
        check("this call", tensor)
    formed = [form(tensor) for tensor in tensors]
    return [tensor for tensor, _ in formed], both(*(after for _, after in formed))
