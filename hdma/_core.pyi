"""csrc/bindings.cc; private to hdma/communicator.py."""

def flags_nbytes(flag_count: int) -> int: ...

class Plan:
    def __init__(self, steps: bytes, sources: bytes, spans: bytes) -> None: ...

class Ticket:
    def wait(self, timeout_s: float) -> bool: ...
    def wait_given(self, mark: int, timeout_s: float) -> bool: ...
    def push(self, mark: int) -> None: ...
    def done(self) -> bool: ...

class Engine:
    def __init__(
        self,
        *,
        rank: int,
        size: int,
        flag_count: int,
        ring_count: int,
        window_nbytes: int,
        timeout_s: float,
        spin_s: float,
        flag_names: list[str],
        peers: list[tuple[int, int, int, int]],
        control: list[tuple[int, int, str]],
        tcp: list[tuple[int, int, int]],
    ) -> None: ...
    def run(
        self,
        text: str,
        pieces: list[tuple[Plan, int, int]],
        input: int,
        output: int,
        input_stride: int,
        output_stride: int,
        dtype: int,
        wire_dtype: int,
        op: int,
    ) -> None: ...
    def submit(
        self,
        text: str,
        pieces: list[tuple[Plan, int, int]],
        input: int,
        output: int,
        input_stride: int,
        output_stride: int,
        dtype: int,
        wire_dtype: int,
        op: int,
        marks: int,
        pushes: bool,
    ) -> Ticket: ...
    def abort(self, kind: int, text: str) -> None: ...
    def fault(self) -> str: ...
    def check(self) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
