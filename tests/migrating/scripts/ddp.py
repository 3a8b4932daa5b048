"""DistributedDataParallel, with the loop in a function of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

losses = []


def train_epoch(model, loader, optimizer):
    model.train()
    for batch in loader:
        # the gradients of the batch before
        optimizer.zero_grad()
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = [{"x": x, "y": x.sum(0, keepdim=True)} for x in torch.randn(32, 4)]
    net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer)
    if dist.get_rank() == 0:
        weights = model.module.state_dict()
        print(f"{len(weights)} tensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
