import argparse

import torch

from pinn import PhysicsInformedNN

ADAM_ITERS = 60
LBFGS_ROUNDS = 4
STEPS_PER_ROUND = 6


def fit(model, lbfgs_lr, line_search):
    model.resample(0)
    optimizer_adam = torch.optim.Adam(model.dnn.parameters(), lr=5e-3)
    model.dnn.train()
    for epoch in range(ADAM_ITERS):
        loss = model.loss()
        optimizer_adam.zero_grad()
        loss.backward()
        optimizer_adam.step()
        if epoch % 20 == 0:
            print('Adam %4d, Loss: %.5e' % (epoch, loss.item()))

    # Backward and optimize
    optimizer = torch.optim.LBFGS(
        model.dnn.parameters(),
        lr=lbfgs_lr,
        max_iter=5,
        history_size=20,
        tolerance_grad=1e-9,
        tolerance_change=1e-12,
        line_search_fn=line_search,
    )

    def loss_func():
        optimizer.zero_grad()
        loss = model.loss()
        loss.backward()
        model.iter += 1
        return loss

    for round_number in range(LBFGS_ROUNDS):
        model.resample(round_number)
        for _ in range(STEPS_PER_ROUND):
            loss = optimizer.step(loss_func)
        print('LBFGS round %d, %d evaluations, Loss: %.5e' % (round_number, model.iter, loss.item()))


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--lbfgs-lr', type=float, default=1.0)
    parser.add_argument('--line-search', type=str, default='strong_wolfe')
    args = parser.parse_args()
    model = PhysicsInformedNN([2, 20, 20, 1])
    fit(model, args.lbfgs_lr, args.line_search if args.line_search != 'none' else None)
