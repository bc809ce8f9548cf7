"""How queue pairs are set up: among other things, how long one tries before it gives a peer up."""

from __future__ import annotations

from hdma import env
from hdma.errors import UsageError
from hdma.nics.choice import Offer

# Device, port, GID index, MTU in bytes, service level, traffic class, time-out exponent, retries: csrc/bindings.cc.
Settings = tuple[str, int, int, int, int, int, int, int]

_UNIT_S = 4.096e-6
# The InfiniBand specification (volume 1, 9.7.6.1.3) lets a NIC take between one and four times the nominal time.
_SLACK = 4
_LONGEST = 18  # about a second a try: lost packets are rare, but should not hold up all ranks


def qp_timeout(timeout_s: float, exponent: int, retries: int) -> int:
    """The exponent t of a queue pair's time-out of 4.096 us x 2^t a try, so that it reports a dead peer in time.

    `exponent`: HDMA_QP_TIMEOUT, or 0 for the greatest up to 18 by which `retries` end within half of `timeout_s`.
    Raises `UsageError` where a given one would not end within `timeout_s`, or where none does within half of it.
    """
    if exponent:
        if _gives_up_s(exponent, retries) >= timeout_s:
            longest = f"{_gives_up_s(exponent, retries):.3g} s ({retries + 1} x {_SLACK} x 4.096 us x 2^{exponent})"
            raise UsageError(
                f"HDMA_QP_TIMEOUT={exponent} with HDMA_QP_RETRIES={retries} lets a NIC try for up to {longest}, which "
                f"is not below HDMA_TIMEOUT_S={timeout_s:g}: lower them, or unset HDMA_QP_TIMEOUT to have it chosen"
            )
        return exponent
    fitting = [t for t in range(1, _LONGEST + 1) if _gives_up_s(t, retries) < timeout_s / 2]
    if not fitting:
        raise UsageError(
            f"a time-out of {timeout_s:g} s is too short for RDMA: with HDMA_QP_RETRIES={retries} a NIC may try for "
            f"{_gives_up_s(1, retries):.3g} s at the least, which must be below half of it: raise HDMA_TIMEOUT_S"
        )
    return fitting[-1]


def _gives_up_s(exponent: int, retries: int) -> float:
    """The longest until a NIC reports that a peer does not answer, seconds."""
    return float((retries + 1) * _SLACK * _UNIT_S * 2**exponent)


def settings(port: Offer, timeout_s: float) -> Settings:
    """What the wire needs to know of this rank's port. Raises `UsageError` as `qp_timeout()` does."""
    retries = env.QP_RETRIES.read()
    how = (env.MTU_NBYTES.read(), env.SERVICE_LEVEL.read(), env.TRAFFIC_CLASS.read())
    return (
        port.device,
        port.port,
        port.gid_index,
        *how,
        qp_timeout(timeout_s, env.QP_TIMEOUT.read(), retries),
        retries,
    )
