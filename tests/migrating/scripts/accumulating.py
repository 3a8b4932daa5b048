"""DistributedDataParallel with accumulation, clipping, a schedule and a window that is divided by hand."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--clip", type=float, default=0.5)
args = parser.parse_args([])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = [{"x": x, "y": x.sum(0, keepdim=True)} for x in torch.randn(32, 4)]
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
    losses, norms = [], []
    for _ in range(2):
        for index, batch in enumerate(loader):
            last = (index + 1) % args.accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = (model(batch["x"]) - batch["y"]).square().mean()
                loss = loss / args.accumulate
                loss.backward()
            losses.append(loss.item() * args.accumulate)
            if (index + 1) % args.accumulate == 0:
                norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                norms.append(float(norm))
    dist.destroy_process_group()
    return losses + norms


losses = main()
