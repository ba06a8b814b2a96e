"""Settings of all tests."""

import os

import torch
from hypothesis import HealthCheck, settings

# One thread, since the cores belong to the test workers; TEST_THREADS=2 tries another number.
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))

# The same examples in every run, and no time limit, which a busy machine would exceed.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
