"""Tests run on one thread: their tensors are tiny, and waiting threads cost more than they give."""

import torch

torch.set_num_threads(1)
