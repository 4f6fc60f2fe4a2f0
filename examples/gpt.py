"""A small GPT learns to write Python, byte by byte. Run it with: evener run --nproc 2 --cpu examples/gpt.py

Its text is Python's own standard library, which is on this machine already. The same file runs under `python` and
`torchrun`; the batch, and so the training, is the same on any number of processes. Two cores need a minute or two;
what it writes then has hardly more than the look of Python. The longer form: --updates 3000.
"""

import argparse
import contextlib
import math
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import evener

VOCABULARY = 256  # a token is a byte


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, length, width, heads, layers):
        super().__init__()
        self.length = length
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # What ends a block is small at first, so that every layer starts close to the identity.
                ends_block = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if ends_block else 0.02)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def standard_library():
    """Every module at the top of Python's standard library, one after the other, as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def windows(text, length):
    """The text as rows of length + 1 bytes: a row's targets are its bytes one further on."""
    return text.unfold(0, length + 1, length)


def loss_fn(model, rows):
    tokens = rows.long()
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return evener.Mean(total=total, count=targets.numel())  # the mean over tokens, not over rows


def bits_per_byte(model, rows):
    nats = loss_fn(model, rows)
    return {"bits": evener.Mean(total=nats.value / math.log(2), count=nats.count)}


def warm_up_then_cosine(optimizer, updates):
    warm_up = max(1, updates // 20)

    def factor(update):
        if update < warm_up:
            return (update + 1) / warm_up
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (update - warm_up) / max(1, updates - warm_up)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def sample(model, prompt, count):
    tokens = torch.tensor([list(prompt.encode())])
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        logits = model(tokens[:, -model.length :])[0, -1]
        choice = torch.multinomial(F.softmax(logits / 0.8, dim=0), 1, generator=generator)
        tokens = torch.cat([tokens, choice[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32, help="rows of an update, over all processes")
    parser.add_argument("--length", type=int, default=128, help="bytes that the model sees at once")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--blank", action="store_true", help="for `evener plan` of a model larger than this machine")
    args = parser.parse_args()

    evener.seed(0)
    text = standard_library()
    held_out = 100_000
    train, validation = windows(text[:-held_out], args.length), windows(text[-held_out:], args.length)
    with evener.blank() if args.blank else contextlib.nullcontext():
        model = GPT(args.length, args.width, args.heads, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)

    run = evener.Run(
        model,
        optimizer,
        loss_fn,
        train,
        global_batch_size=args.batch,
        max_grad_norm=1.0,
        scheduler=warm_up_then_cosine(optimizer, args.updates),
    )
    for update in run.updates(updates=args.updates):
        done = update.number + 1
        if done % 100 == 0 or done == args.updates:
            bits = run.evaluate(validation, bits_per_byte)["bits"]
            run.print(f"update {done}: {update.loss:.3f} nats per byte here, {bits:.3f} bits per byte on new text")
    if run.is_main:
        print(sample(model, "def ", 300))
    run.close()


if __name__ == "__main__":
    main()
