import argparse

import numpy as np
import torch

from datasets import get_loaders
from losses import compute_gradient_penalty
from models import Discriminator, Generator

parser = argparse.ArgumentParser()
parser.add_argument("--n_epochs", type=int, default=8, help="number of epochs of training")
parser.add_argument("--batch_size", type=int, default=16, help="size of the batches")
parser.add_argument("--lr", type=float, default=0.0005, help="adam: learning rate of the generator")
parser.add_argument("--lr_d", type=float, default=0.001, help="learning rate of the critic")
parser.add_argument("--opt_d", type=str, default="adam", help="optimizer of the critic: adam or sgd")
parser.add_argument("--b1", type=float, default=0.5, help="adam: decay of first order momentum of gradient")
parser.add_argument("--b2", type=float, default=0.9, help="adam: decay of first order momentum of gradient")
parser.add_argument("--latent_dim", type=int, default=8, help="dimensionality of the latent space")
parser.add_argument("--img_size", type=int, default=8, help="size of each image dimension")
parser.add_argument("--channels", type=int, default=1, help="number of image channels")
parser.add_argument("--n_critic", type=int, default=5, help="number of training steps for discriminator per iter")
parser.add_argument("--lambda_gp", type=float, default=10, help="weight of the gradient penalty")
parser.add_argument("--seed", type=int, default=0)
opt = parser.parse_args()

np.random.seed(opt.seed)
torch.manual_seed(opt.seed)

img_shape = (opt.channels, opt.img_size, opt.img_size)

# Initialize generator and discriminator
generator = Generator(opt.latent_dim, img_shape)
discriminator = Discriminator(img_shape)

# Configure data loader
dataloader, val_loader = get_loaders(opt)

# Optimizers
optimizer_G = torch.optim.Adam(generator.parameters(), lr=opt.lr, betas=(opt.b1, opt.b2))
if opt.opt_d == "adam":
    optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=opt.lr_d, betas=(opt.b1, opt.b2))
else:
    optimizer_D = torch.optim.SGD(discriminator.parameters(), lr=opt.lr_d)

# ----------
#  Training
# ----------

batches_done = 0
for epoch in range(opt.n_epochs):
    for i, real_imgs in enumerate(dataloader):

        # ---------------------
        #  Train Discriminator
        # ---------------------

        optimizer_D.zero_grad()

        # Sample noise as generator input
        z = torch.randn(real_imgs.shape[0], opt.latent_dim)

        # Generate a batch of images
        fake_imgs = generator(z).detach()

        # Real images
        real_validity = discriminator(real_imgs)
        # Fake images
        fake_validity = discriminator(fake_imgs)
        # Gradient penalty
        gradient_penalty = compute_gradient_penalty(discriminator, real_imgs, fake_imgs)
        # Adversarial loss
        d_loss = -torch.mean(real_validity) + torch.mean(fake_validity) + opt.lambda_gp * gradient_penalty

        d_loss.backward()
        optimizer_D.step()

        # Train the generator every n_critic steps
        if i % opt.n_critic == 0:

            # -----------------
            #  Train Generator
            # -----------------

            optimizer_G.zero_grad()

            # Generate a batch of images
            fake_imgs = generator(z)
            # Loss measures generator's ability to fool the discriminator
            # Train on fake images
            fake_validity = discriminator(fake_imgs)
            g_loss = -torch.mean(fake_validity)

            g_loss.backward()
            optimizer_G.step()

            batches_done += opt.n_critic

    print(
        "[Epoch %d/%d] [D loss: %f] [G loss: %f]" % (epoch, opt.n_epochs, d_loss.item(), g_loss.item())
    )

with torch.no_grad():
    score = np.mean([discriminator(x).mean().item() for x in val_loader])
print("validation score %.4f" % score)
