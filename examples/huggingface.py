"""A tiny GPT-2 with random weights, trained by the Hugging Face Trainer, with evaluations and checkpoints."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from sftriage.integrations.huggingface import SftriageCallback


class Sequences(torch.utils.data.Dataset):
    """Token sequences, drawn anew from their index."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = torch.randint(256, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main(directory, steps):
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=40,
        save_steps=60,
        report_to="tensorboard",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Sequences(100_000), eval_dataset=Sequences(64))
    trainer.add_callback(SftriageCallback())
    trainer.train()
    # (The process group goes with the process. Destroyed before the model, Gloo waits for a thread that waits for
    # Python, one time in six.)


if __name__ == "__main__":
    main(sys.argv[1], steps=150)
