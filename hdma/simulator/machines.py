"""Machines as data, for the time model. To add one: a row in MACHINES."""

from __future__ import annotations

from dataclasses import dataclass

from hdma.errors import UsageError


@dataclass(frozen=True)
class Machine:
    """Rates in GB/s (1e9 bytes a second), times in seconds.

    `link_gb_s`: one rank to one node mate. `out_gb_s`, `in_gb_s`: one rank to and from all node mates. `nic_gb_s`: each
    way; a rank's NIC serves one put at a time, in order. `host_gb_s`: a GPU to and from host memory. `reduce_gb_s`:
    bytes read and written by the reduction kernel. `memory_gb_s`: of one rank, or (`one_memory`) of all ranks together.
    `copies_at_once`: copies of a batch in flight.

    `copy_s`, `reduce_s`, `signal_s`, `wait_s`: from one step of a lane to the next, besides its bytes; `more_s`: every
    further signal or wait of a batch. `post_s`: the proxy's work for a put. `put_s`: from the last byte on the NIC to
    the flag.

    `walkers`: lanes that share one in-order queue. `estimated`: the fields that nobody measured.
    """

    name: str
    link_gb_s: float
    out_gb_s: float
    in_gb_s: float
    nic_gb_s: float
    reduce_gb_s: float
    memory_gb_s: float
    copies_at_once: int
    copy_s: float
    reduce_s: float
    signal_s: float
    wait_s: float
    more_s: float
    post_s: float
    put_s: float
    one_memory: bool = False
    walkers: tuple[tuple[str, ...], ...] = (("near",), ("rail",), ("put",), ("credit",))
    host_gb_s: float = 50
    estimated: tuple[str, ...] = ("host_gb_s",)


# A thread walks both lanes. The proxy's lanes never hold each other.
ONE_WALKER = (("near", "rail"), ("put",), ("credit",))

MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        # A laptop: all ranks copy through one memory, and their wires are loopback TCP.
        Machine(
            "host",
            link_gb_s=8,
            out_gb_s=8,
            in_gb_s=8,
            nic_gb_s=2.5,
            reduce_gb_s=10,
            memory_gb_s=20,
            copies_at_once=1,
            copy_s=1e-6,
            reduce_s=1e-6,
            signal_s=1e-6,
            wait_s=5e-6,
            more_s=0.2e-6,
            post_s=5e-6,
            put_s=20e-6,
            one_memory=True,
            walkers=ONE_WALKER,
            estimated=(
                "link_gb_s",
                "host_gb_s",
                "nic_gb_s",
                "reduce_gb_s",
                "memory_gb_s",
                "copy_s",
                "wait_s",
                "post_s",
                "put_s",
            ),
        ),
        # Copies by peer engines, same-device copies and a write + wait pair were measured on two GPUs (NVLink) with
        # prototypes, not by hdma.
        Machine(
            "h200",
            link_gb_s=378,
            out_gb_s=378,
            in_gb_s=378,
            nic_gb_s=50,
            reduce_gb_s=2000,
            memory_gb_s=4000,
            copies_at_once=8,
            copy_s=3e-6,
            reduce_s=4e-6,
            signal_s=2.75e-6,
            wait_s=2.75e-6,
            more_s=0.5e-6,
            post_s=1e-6,
            put_s=4e-6,
            estimated=("nic_gb_s", "host_gb_s", "copies_at_once", "copy_s", "reduce_s", "more_s", "post_s", "put_s"),
        ),
        # One copy engine a peer and 61 GB/s a link fit transfer curves that others report: 17 GB/s at 64 KB, 52 at
        # 1 MB, 60 at 8 MB.
        Machine(
            "mi355x",
            link_gb_s=61,
            out_gb_s=427,
            in_gb_s=427,
            nic_gb_s=50,
            reduce_gb_s=1500,
            memory_gb_s=5000,
            copies_at_once=7,
            copy_s=6e-6,
            reduce_s=8e-6,
            signal_s=6e-6,
            wait_s=5e-6,
            more_s=2e-6,
            post_s=1e-6,
            put_s=4e-6,
            estimated=(
                *(
                    "out_gb_s",
                    "in_gb_s",
                    "nic_gb_s",
                    "host_gb_s",
                    "reduce_gb_s",
                    "memory_gb_s",
                    "copies_at_once",
                    "copy_s",
                ),
                *("reduce_s", "signal_s", "wait_s", "more_s", "post_s", "put_s"),
            ),
        ),
    )
}


def find_machine(machine: str | Machine) -> Machine:
    """Raises `UsageError` for a name that is not in MACHINES."""
    if isinstance(machine, Machine):
        return machine
    if machine not in MACHINES:
        raise UsageError(f"no machine {machine!r}: there are {', '.join(MACHINES)}")
    return MACHINES[machine]
