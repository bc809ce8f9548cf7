"""What a benchmark times on a GPU comes after what its caller has put on another stream, which takes a second here."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from places import PLACES

place = PLACES["gpu"](0)
made, seen = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
torch.cuda.synchronize()
torch.cuda._sleep(2_000_000_000)  # Of the clock: about a second.
made.fill_(1)
place.timed(lambda: seen.copy_(made))
assert seen.item() == 1, "the region came before what it was to follow"
