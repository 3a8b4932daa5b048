"""FSDP2, block by block, with a scheduler."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
data = [{"x": x, "y": x.sum(0, keepdim=True)} for x in torch.randn(32, 4)]
model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
for block in (model[0], model[2]):
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=8)
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
losses = []
for step, batch in enumerate(loader):
    loss = (model(batch["x"]) - batch["y"]).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
    print(f"step {step}: loss {losses[-1]:.4f}, norm {float(norm):.4f}")
