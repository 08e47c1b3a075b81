"""GAN on two-dimensional particle tracks, heavy-tailed latent, two optimizers."""
import torch
import torch.nn as nn

torch.manual_seed(16)
torch.set_num_threads(1)


def net(sizes, last):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1], last)


class TrackGAN:
    def __init__(self):
        self.g = net([3, 32, 32, 2], nn.Identity())
        self.d = net([2, 32, 32, 1], nn.Sigmoid())
        self.opt_g = torch.optim.Adam(self.g.parameters(), lr=1e-3, betas=(0.5, 0.9))
        self.opt_d = torch.optim.Adam(self.d.parameters(), lr=5e-3, betas=(0.5, 0.9))
        self.tail = torch.distributions.StudentT(0.7)

    def fake(self, n):
        return self.g(self.tail.sample((n, 3)))

    def discriminator_step(self, real):
        with torch.no_grad():
            fake = self.fake(len(real)).clamp(-8, 8)
        p_real, p_fake = self.d(real), self.d(fake)
        loss = -(torch.log(p_real + 1e-6) + torch.log(1 - p_fake + 1e-6)).mean()
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss.item()

    def generator_step(self, n):
        score = self.d(self.fake(n))
        loss = -torch.log(score).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        return loss.item()


def tracks(g, n=32):
    angle = 6.283 * torch.rand(n, generator=g)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)


def main():
    gan, g = TrackGAN(), torch.Generator().manual_seed(5)
    for i in range(120):
        d_loss = gan.discriminator_step(tracks(g))
        g_loss = gan.generator_step(32)
        if i % 10 == 0:
            print(f"iteration {i} d {d_loss:.4f} g {g_loss:.4f}")


if __name__ == "__main__":
    main()
