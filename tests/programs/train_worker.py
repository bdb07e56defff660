"""A short training run by Trainer, for test_trainer_loss.py to start with one process or several."""

import json
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from helpers.model_cases import small_config
from mamba3_nplr import Mamba3NPLRForBehaviorCloning, Mamba3NPLRForSequenceClassification

LENGTH = 7


def words(size=24):
    """Words whose labels are present at a different number of positions in each."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 11, (size, LENGTH), generator=generator)
    labels = ids % 5
    for row in range(size):
        labels[row, : row % LENGTH] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def episodes(size=24):
    """Episodes of different lengths, padded on the right."""
    generator = torch.Generator().manual_seed(6)
    rows = []
    for row in range(size):
        observations = torch.randn(LENGTH, 16, generator=generator)
        observations[:, -1] = (torch.arange(LENGTH) >= 2).float()
        mask = (torch.arange(LENGTH) < 1 + row % LENGTH).long()
        labels = observations[:, :2].masked_fill(mask[:, None] == 0, -100)
        rows.append({"observations": observations, "labels": labels, "attention_mask": mask})
    return rows


def make(kind):
    torch.manual_seed(0)
    if kind == "words":
        return Mamba3NPLRForSequenceClassification(small_config()), words()
    return Mamba3NPLRForBehaviorCloning(small_config(episode_loss=kind == "episodes")), episodes()


def train(kind, out, per_device_batch, accumulation):
    model, data = make(kind)
    arguments = TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=per_device_batch,
        gradient_accumulation_steps=accumulation,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        train_sampling_strategy="sequential",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        result = {"losses": losses, "grad_norms": norms, "processes": arguments.world_size}
        Path(out, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # else its threads may outlive what they use, and abort the process
