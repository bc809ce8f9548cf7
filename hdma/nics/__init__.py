"""RDMA devices: which there are, which port each rank uses, and why one cannot be used. Loads no driver."""

from hdma.nics.agreement import Card, along_rails, card, decide
from hdma.nics.choice import Offer, Reason, admitted, choose, distance, fault, library_error, why_none
from hdma.nics.queue_pair import Settings, qp_timeout, settings
from hdma.nics.sysfs import Gid, Nic, Place, Port, find, gpu_place

__all__ = [
    "Card",
    "Gid",
    "Nic",
    "Offer",
    "Place",
    "Port",
    "Reason",
    "Settings",
    "admitted",
    "along_rails",
    "card",
    "choose",
    "decide",
    "distance",
    "fault",
    "find",
    "gpu_place",
    "library_error",
    "qp_timeout",
    "settings",
    "why_none",
]
