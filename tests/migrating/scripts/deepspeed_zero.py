"""deepspeed.initialize with a config in the script."""

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
}
deepspeed.init_distributed()
torch.manual_seed(0)
data = [{"x": x, "y": x.sum(0, keepdim=True)} for x in torch.randn(32, 4)]
model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
losses = []
for epoch in range(2):
    for batch in loader:
        batch = {name: value.to(engine.device) for name, value in batch.items()}
        loss = (engine(batch["x"]) - batch["y"]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
