"""How sure a median is: intervals by resampling the turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES, LEVEL = 2000, 0.95


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Of 95 %, by resampling the values. Deterministic."""
    return interval_of_mean_of_medians([values])


def interval_of_mean_of_medians(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Of 95 %, of the geometric mean of the groups' medians, all positive, by resampling within each group."""
    chance = np.random.default_rng(0)
    logs = np.zeros(RESAMPLES)
    for values in groups:
        array = np.asarray(values, np.float64)
        logs += np.log(np.median(array[chance.integers(0, len(array), (RESAMPLES, len(array)))], axis=1))
    tail = (1 - LEVEL) / 2
    low, high = np.exp(np.quantile(logs / len(groups), [tail, 1 - tail]))
    return float(low), float(high)
