"""Hypothesis profile of the store's tests: no deadline, because the machine is shared; the same examples at each run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "store", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("store")
