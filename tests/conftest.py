"""Tests run on one thread: their tensors are tiny, and waiting threads cost more than they give.

So do the processes that they start, whose sums would otherwise differ in the last digits.
"""

import os

import torch

os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
