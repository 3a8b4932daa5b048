"""QLoRA as scripts of other frameworks write it, that tests run plain and on engines, on ranks."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import torch

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 3,
}
BATCH, WINDOW, UPDATES, HALF = 2, 4, 4, 2
"""Samples of a micro-batch, micro-batches of an update over all ranks, updates, and those before a run is resumed."""
ADAPTED = ["q_proj", "v_proj", "down_proj"]
CLIP, RATE = 0.5, 1e-2


def write_base(folder):
    """The model that scripts load."""
    import transformers

    transformers.set_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)


def quantized(base):
    """The base in 4 bits."""
    import transformers

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=ADAPTED, task_type="CAUSAL_LM")


def adapted(base):
    """The base in 4 bits with adapters, as peft's page on quantization has it."""
    from peft import get_peft_model, prepare_model_for_kbit_training

    model = prepare_model_for_kbit_training(quantized(base))
    torch.manual_seed(5)
    with _as_peft_asks():
        return get_peft_model(model, lora())


@contextmanager
def _as_peft_asks():
    """peft 0.21.2 asks transformers 5.23 by an old name (peft/peft_model.py)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def samples():
    """Of all updates, each of the same length."""
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 64, (BATCH * WINDOW * UPDATES, 9), generator=made)
    return [{"input_ids": row, "labels": row.clone(), "attention_mask": torch.ones_like(row)} for row in ids]


def loss_with(base, folder):
    """Of the base that bitsandbytes has quantized, with saved adapters."""
    from peft import PeftModel

    with _as_peft_asks():
        model = PeftModel.from_pretrained(quantized(base), folder).train()
    batch = torch.utils.data.default_collate(samples()[:4])
    with torch.no_grad():
        return model(**batch).loss.item()


def _runs(backend):
    """Whether each run of a program goes on from the half. Accelerate and Lightning themselves cannot load a state with
    the layers of bitsandbytes.
    """
    return (False,) if backend == "plain" else (False, True)


# -- transformers and TRL ---------------------------------------------------------------------------


def _arguments(kind, folder, world, **options):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    given = {
        "output_dir": folder,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": WINDOW // world,
        "max_grad_norm": CLIP,
        "learning_rate": RATE,
        "lr_scheduler_type": "linear",
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": HALF,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "ddp_find_unused_parameters": False,  # of its own run, where recomputation would mark them twice
    }
    return kind(**given | options)


def trainer(framework, backend, base, folder, world):
    """Of transformers, or of TRL, which adds the adapters itself."""
    import transformers

    transformers.logging.set_verbosity_error()
    if framework == "trl":
        import trl
        from datasets import Dataset

        rows = [{"input_ids": sample["input_ids"].tolist()} for sample in samples()]
        kind, args = trl.SFTTrainer, _arguments(trl.SFTConfig, folder, world, max_length=32)
        torch.manual_seed(5)
        given = {"model": quantized(base), "peft_config": lora(), "train_dataset": Dataset.from_list(rows)}
        given["processing_class"] = _tokenizer()
    else:
        kind, args = transformers.Trainer, _arguments(transformers.TrainingArguments, folder, world)
        given = {"model": adapted(base), "train_dataset": samples()}
    if backend != "plain":
        from unishard.integrations.transformers import UnishardMixin

        kind = type("OnUnishard", (UnishardMixin, kind), {})
        given["unishard"] = {"backend": backend, "sharding": "full_shard"}
    transformers.set_seed(7)
    made = kind(args=args, **given)
    if framework == "trl" and backend == "plain":
        for parameter in made.model.parameters():
            if parameter.requires_grad:  # TRL has rounded adapters to bf16, which engines keep in fp32
                parameter.data = parameter.data.float()
    return made


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", "<bos>", *(f"w{number}" for number in range(60))]
    words = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<bos>"
    )


def with_a_trainer(framework, backend, base, folder, world):
    """Losses and norms of all updates, and those of a run that goes on from its half; the adapters are saved."""
    found = []
    for resumes in _runs(backend):
        place = f"{folder}/resumed" if resumes else folder
        made = trainer(framework, backend, base, place, world)
        made.train(resume_from_checkpoint=f"{folder}/checkpoint-{HALF}" if resumes else None)
        found.append(
            [entry[name] for entry in made.state.log_history for name in ("loss", "grad_norm") if name in entry]
        )
        if not resumes:
            made.save_model(f"{folder}/adapters")
        if hasattr(made.accelerator, "engine_of"):
            made.accelerator.close()
    return found


# -- Accelerate --------------------------------------------------------------------------------------


def with_accelerate(backend, base, folder, world):
    """The same; the script saves its state at the half, and the adapters at the end."""
    from accelerate_programs import accelerator

    found = []
    for resumes in _runs(backend):
        acc = accelerator(backend, gradient_accumulation_steps=WINDOW // world)
        model = adapted(base)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=RATE)
        loader = torch.utils.data.DataLoader(samples(), batch_size=BATCH)
        model, optimizer, loader = acc.prepare(model, optimizer, loader)
        if resumes:
            acc.load_state(f"{folder}/half")
            loader = acc.skip_first_batches(loader, HALF * WINDOW // world)
        model.train()
        found.append([])
        losses = []
        for batch in loader:
            with acc.accumulate(model):
                loss = model(**batch).loss
                acc.backward(loss)
                losses.append(acc.reduce(loss.detach(), "mean").item())
                norm = float(acc.clip_grad_norm_(model.parameters(), CLIP)) if acc.sync_gradients else None
                optimizer.step()
                optimizer.zero_grad()
            if norm is not None:
                found[-1] += [sum(losses) / len(losses), norm]
                losses = []
                if len(found[-1]) == 2 * HALF and not resumes:
                    acc.save_state(f"{folder}/half")
        if not resumes:
            unwrapped, state = acc.unwrap_model(model), acc.get_state_dict(model)
            if acc.is_main_process:
                unwrapped.save_pretrained(f"{folder}/adapters", state_dict=state)
        acc.free_memory()
    return found if len(found) == 1 else [found[0], found[0][: 2 * HALF] + found[1]]


# -- Lightning ---------------------------------------------------------------------------------------


def with_lightning(backend, base, folder, world):
    """The same in one list, in two epochs; a callback of Lightning saves after the first one, and that run ends."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_programs import strategy, trainer

    class Tuned(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = adapted(base)
            self.losses, self.norms = [], []

        def training_step(self, batch):
            loss = self.model(**batch).loss
            self.losses.append(self.trainer.strategy.reduce(loss.detach().clone()).item())
            return loss

        def on_before_optimizer_step(self, optimizer):
            engine = getattr(self.trainer.strategy, "engine", None)
            gradients = [each.grad for each in self.parameters() if each.grad is not None]
            norm = engine.gradients.norm() if engine else torch.nn.utils.get_total_norm(gradients)
            self.norms.append(norm.item())

        def configure_optimizers(self):
            return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=RATE)

    window, found = WINDOW // world, []
    for resumes in _runs(backend):
        saves = backend != "plain" and not resumes
        options = {"accumulate_grad_batches": window, "gradient_clip_val": CLIP, "enable_checkpointing": saves}
        options["callbacks"] = [ModelCheckpoint(folder, filename="half")] if saves else []
        run, module = trainer(strategy(backend), max_epochs=1 if saves else 2, **options), Tuned()
        loader = torch.utils.data.DataLoader(samples()[: BATCH * WINDOW * HALF], batch_size=BATCH)
        run.fit(module, loader, ckpt_path=f"{folder}/half.ckpt" if resumes else None)
        means = [sum(module.losses[at : at + window]) / window for at in range(0, len(module.losses), window)]
        found += [figure for pair in zip(means, module.norms, strict=True) for figure in pair]
        engine, state = getattr(run.strategy, "engine", None), None
        if engine is not None:
            state = {name.removeprefix("model."): each for name, each in engine.weights.state_dict().items()}
            engine.close()
        if run.is_global_zero:
            module.model.save_pretrained(f"{folder}/adapters", state_dict=state)
    return [found]
