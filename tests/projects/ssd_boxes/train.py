"""Train a tiny detector."""
import torch
from torch.utils.data import DataLoader, Subset

from dataset import StreetScenes, collate_fn
from engine import evaluate, train_one_epoch
from model import TinyDetector


def get_args_parser():
    import argparse

    parser = argparse.ArgumentParser(description="Detection training")
    parser.add_argument("--data-seed", default=0, type=int)
    parser.add_argument("-b", "--batch-size", default=8, type=int)
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--lr", default=0.02, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
    parser.add_argument("--warmup-factor", default=0.01, type=float)
    parser.add_argument("--norm", default="bn", choices=["bn", "none"])
    return parser


def main(args):
    torch.manual_seed(0)
    dataset = StreetScenes(n=256, seed=args.data_seed)
    indices = torch.randperm(len(dataset)).tolist()
    dataset_train, dataset_test = Subset(dataset, indices[:-40]), Subset(dataset, indices[-40:])
    data_loader = DataLoader(dataset_train, batch_size=args.batch_size, shuffle=True, collate_fn=collate_fn)
    data_loader_test = DataLoader(dataset_test, batch_size=args.batch_size, collate_fn=collate_fn)

    model = TinyDetector(norm_layer=torch.nn.BatchNorm2d if args.norm == "bn" else torch.nn.Identity)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)

    for epoch in range(args.epochs):
        train_one_epoch(model, optimizer, data_loader, epoch, warmup_factor=args.warmup_factor)
        lr_scheduler.step()
        evaluate(model, data_loader_test)


if __name__ == "__main__":
    main(get_args_parser().parse_args())
