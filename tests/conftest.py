"""Tests run on one thread, since the cores belong to the test workers; TEST_THREADS=2 tries another number."""

import os

import torch

torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))
