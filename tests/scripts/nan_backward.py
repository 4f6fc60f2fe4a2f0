"""The backward of the third line makes a NaN; without anomaly detection nothing is said."""

import torch

x = torch.zeros(3, requires_grad=True)
y = x.sqrt()  # the guilty line
(y * 0).sum().backward()
print("finished")
