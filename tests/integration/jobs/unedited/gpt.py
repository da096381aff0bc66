# A small language model, trained as nanoGPT does it: a script, no functions around the loop, and no DataLoader.
import math
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from samples import samples
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

max_iters, eval_interval, eval_iters, gradient_accumulation_steps = 110, 30, 2, 2
batch_size, block_size, vocab_size, n_embd, n_head, grad_clip = 4, 32, 64, 32, 4, 1.0

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group("gloo")
    ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
else:
    ddp_rank, ddp_world_size = 0, 1
master_process = ddp_rank == 0
torch.manual_seed(1337 + ddp_rank)
torch.set_num_threads(1)
ctx = torch.amp.autocast("cpu", dtype=torch.bfloat16)
data = samples(512, block_size + 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            one.view(B, T, n_head, C // n_head).transpose(1, 2) for one in self.c_attn(self.ln_1(x)).split(n_embd, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


def get_batch(split):
    rows = torch.randint(len(data), (batch_size,))
    tokens = torch.stack([data[i][0] for i in rows.tolist()]).abs().mul(17).long() % vocab_size
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                logits, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model
X, Y = get_batch("train")
iter_num, best_val_loss = 0, math.inf
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = 1e-3 * (1 - iter_num / (max_iters + 1))
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            torch.save({"model": raw_model.state_dict(), "iter_num": iter_num}, Path(sys.argv[1]) / "ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break
if master_process:
    print(loss.item().hex())
    torch.save([one.detach() for one in raw_model.parameters()], Path(sys.argv[1]) / "trained.pt")
if ddp:
    destroy_process_group()
sys.stdout.flush()
os._exit(0)
