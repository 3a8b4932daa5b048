"""Policy gradient on a tiny Llama: it learns to continue a prompt with even tokens, close to a frozen reference.

    torchrun --nproc-per-node 2 examples/reinforce_llama.py
    torchrun --nproc-per-node 2 examples/reinforce_llama.py --set backend=deepspeed

Each update samples completions with `engine.generate`, scores them, and trains on what was better than the mean of its
prompt; the reference is a second engine without an optimizer. Now and then an inference server gets the weights.
Nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import unishard

VOCABULARY, PROMPT, COMPLETION, SAMPLES = 32, 4, 8, 8
CONFIG = {
    "backend": "fsdp",
    "sharding": "full_shard",
    "training": {"micro_batch_size": 2, "gradient_clipping": 1.0, "seed": 0},
    "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.0},
}


def main() -> dict[str, list[float]]:
    args = arguments()
    cfg = unishard.load(CONFIG, overrides=args.set)
    here = unishard.Topology.from_environment()
    count = args.steps * cfg.training.micro_batch_size * here.world_size
    prompts = torch.randint(VOCABULARY, (count, PROMPT), generator=torch.Generator().manual_seed(0))
    server = policy() if here.rank == 0 else None
    log: dict[str, list[float]] = {"rewards": [], "distances": []}

    reference = unishard.prepare(policy(), cfg, train=False)
    with reference, unishard.prepare(policy(), cfg) as engine:
        for number, batch in enumerate(engine.batches(unishard.dataloader(prompts, cfg))):
            sequences = sampled(engine, batch)
            rewards = reward(sequences[:, PROMPT:])
            groups = rewards.view(-1, SAMPLES)
            advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)

            found, frozen = log_probabilities(engine, sequences), log_probabilities(reference, sequences)
            distance = (frozen - found).exp() - (frozen - found) - 1
            loss = (0.02 * distance - advantages * found).mean()
            engine.backward(loss)
            engine.step()

            log["rewards"].append(engine.mean(rewards.mean()))
            log["distances"].append(engine.mean(distance.detach().mean()))
            if (number + 1) % args.push == 0:
                push(engine, server)
    if here.rank == 0:
        first, last = (sum(part) / len(part) for part in (log["rewards"][:5], log["rewards"][-5:]))
        print(f"{cfg.backend}: reward {first:.3f} -> {last:.3f} after {args.steps} updates, {here.world_size} ranks")
    return log


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Policy gradient on a tiny Llama.")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field, such as backend=deepspeed"
    )
    parser.add_argument("--steps", type=int, default=40, help="number of updates")
    parser.add_argument("--push", type=int, default=10, help="updates between two pushes of the weights")
    return parser.parse_args()


def policy() -> LlamaForCausalLM:
    """The same weights on every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, bos_token_id=None, eos_token_id=None))


def sampled(engine: unishard.Engine, prompts: Tensor) -> Tensor:
    """Several completions of each prompt, by the policy as it is now."""
    engine.eval()
    sequences = engine.generate(
        prompts.repeat_interleave(SAMPLES, 0),
        attention_mask=torch.ones(len(prompts) * SAMPLES, PROMPT, dtype=torch.long, device=prompts.device),
        do_sample=True,
        max_new_tokens=COMPLETION,
        pad_token_id=0,
    )
    engine.train()
    return sequences.clone()


def reward(completions: Tensor) -> Tensor:
    """The part of even tokens; yours asks a reward model, a test or a judge."""
    return (completions % 2 == 0).float().mean(1)


def log_probabilities(engine: unishard.Engine, sequences: Tensor) -> Tensor:
    """Of each token of the completions, under a policy."""
    logits = engine(input_ids=sequences).logits[:, PROMPT - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, sequences[:, PROMPT:, None]).squeeze(-1)


def push(engine: unishard.Engine, server: LlamaForCausalLM | None) -> None:
    """Send the weights to an inference server, tensor by tensor; here it is a plain model on rank 0."""
    for name, tensor in engine.weights.stream(dtype="fp32", merged=True):
        if server is not None:
            server.state_dict()[name].copy_(tensor)


if __name__ == "__main__":
    main()
