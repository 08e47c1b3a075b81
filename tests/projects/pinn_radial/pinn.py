import torch

from network import DNN
from sampling import Collocation, boundary, initial


# the physics-guided neural network
class PhysicsInformedNN():
    """u_t = u_rr + u_r / r - k sqrt|u| on the unit disc, u = 0 on its rim."""

    def __init__(self, layers, n_f=200, k=0.5, seed=0):
        torch.manual_seed(seed)
        self.points = Collocation(n_f, seed)
        self.r_b, self.t_b = boundary(40)
        self.r_0, self.t_0 = initial(40)
        self.u_0 = 1 - self.r_0 ** 2
        self.k = k
        self.dnn = DNN(layers)
        self.iter = 0

    def net_u(self, r, t):
        # the rim is built in: (1 - r^2) * N(r, t)
        return (1 - r ** 2) * self.dnn(torch.cat([r, t], dim=1))

    def net_f(self, r, t):
        """ The pytorch autograd version of calculating residual """
        u = self.net_u(r, t)
        u_t = torch.autograd.grad(u, t, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_r = torch.autograd.grad(u, r, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_rr = torch.autograd.grad(u_r, r, grad_outputs=torch.ones_like(u_r), retain_graph=True, create_graph=True)[0]
        sink = torch.sqrt(u.abs() + 1e-6)
        return u_t - u_rr - u_r / r + self.k * sink

    def loss(self):
        loss_0 = torch.mean((self.net_u(self.r_0, self.t_0) - self.u_0) ** 2)
        loss_f = torch.mean(self.net_f(self.r_f, self.t_f) ** 2)
        return 10 * loss_0 + 0.01 * loss_f

    def resample(self, round_number):
        r, t = self.points.draw(round_number)
        # the rim belongs to the domain too
        self.r_f = torch.cat([r, self.r_b]).requires_grad_()
        self.t_f = torch.cat([t, self.t_b]).requires_grad_()
