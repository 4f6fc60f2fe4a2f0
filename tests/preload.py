"""Imported once by the fork server: what every test rank needs, so that a fork is cheap.

The first optimizer constructor pulls in torch._dynamo (seconds); it is paid here, once.
"""

import torch
import torch.distributed

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
torch.set_num_threads(1)
