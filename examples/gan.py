"""A GAN in one loop: two networks, two optimizers, several critic steps for each step of the generator.

Run it with: evener run --nproc 2 --cpu examples/gan.py

A Wasserstein GAN with gradient penalty on scikit-learn's handwritten digits. With --exact a run that was stopped
(Ctrl-C) and started again, on any number of processes, prints the digest of one that was not.
"""

import argparse

import torch
from torch import nn

import evener

NOISE, PIXELS = 16, 64


def digits():
    from sklearn.datasets import load_digits

    return torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1


def generate(models, rows):
    return models["g"](torch.randn(rows, NOISE))


def critic_loss(models, images):
    """Wasserstein distance, negated, plus the penalty: the critic's slope between real and made images should be 1."""
    with torch.no_grad():
        made = generate(models, len(images))
    real, fake = models["d"](images), models["d"](made)
    share = torch.rand(len(images), 1)
    between = (share * images + (1 - share) * made).requires_grad_(True)
    (slope,) = torch.autograd.grad(models["d"](between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square()
    distance = evener.Mean(total=(real - fake).sum().detach(), count=len(images))
    return (fake - real).mean() + 10 * penalty.mean(), {"distance": distance}


def generator_loss(models, images):
    return -models["d"](generate(models, len(images))).mean()


def cosine(steps_per_batch):
    def schedule(optimizer, batches):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, int(batches * steps_per_batch)))

    return schedule


def picture(image):
    shades = " .:-=+*#"
    return "\n".join("".join(2 * shades[int(value * 3.99 + 4)] for value in row) for row in image.view(8, 8).tolist())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64, help="images of an update, over all processes")
    parser.add_argument("--critic-steps", type=int, default=5, help="for each step of the generator")
    parser.add_argument("--exact", action="store_true", help="the same bits on any number of processes")
    args = parser.parse_args()

    evener.seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.LeakyReLU(0.2), nn.Linear(128, PIXELS), nn.Tanh())
    critic = nn.Sequential(nn.Linear(PIXELS, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    models = {"g": generator, "d": critic}
    optimizers = {
        name: torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9)) for name, model in models.items()
    }

    run = evener.Run(
        models,
        optimizers,
        dataset=digits(),
        global_batch_size=args.batch,
        max_grad_norm={"d": 10.0},
        scheduler={"g": cosine(1 / args.critic_steps), "d": cosine(1)},
        precision="fp32",  # slopes of slopes lose too much in half precision
        exact=args.exact,
    )
    cycle = args.critic_steps + 1
    for batch in run.batches(epochs=args.epochs):
        update = run.step(batch, loss_fn=critic_loss, optimizer="d")
        # The number of the next update, not a counter of our own: it goes on where a stopped run stood.
        if run.number % cycle == cycle - 1:
            run.step(batch, loss_fn=generator_loss, optimizer="g")
        if batch.ends_epoch and batch.epoch % 10 == 9:
            run.print(f"epoch {batch.epoch}: distance {update.metrics['distance']:.3f}")
    made = run.predict(torch.zeros(2, 1), lambda models, rows: generate(models, len(rows)))
    run.print("\n".join(picture(image) for image in made))
    if args.exact:
        run.print(f"digest {run.digest()}")
    run.close()


if __name__ == "__main__":
    main()
