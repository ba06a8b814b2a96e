"""Every test runs on one thread: the machine's cores belong to the test workers."""

import torch

torch.set_num_threads(1)
