"""A 70 B Llama-shaped model, never with storage, for the planner:

PYTHONPATH=. evener plan --gpu H100-80GB --nproc 8 --nodes 128 bench/plan_llama70b.py
"""

import torch

import evener
from bench.plan_published import SIZES, Llama, loss_deleting_logits

with evener.blank():
    model = Llama(*SIZES["70B"], "all")
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
rows = torch.zeros(4096, 4097, dtype=torch.int64)
run = evener.Run(model, optimizer, loss_deleting_logits, rows, global_batch_size=1024, max_grad_norm=1.0)
