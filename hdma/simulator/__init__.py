"""The paper machine: proves plans before any hardware sees them, and times them on machines described as data."""

from hdma.simulator.machines import MACHINES, Machine
from hdma.simulator.prove import Proof, prove
from hdma.simulator.simulation import Simulation, simulate

__all__ = ["MACHINES", "Machine", "Proof", "Simulation", "prove", "simulate"]
