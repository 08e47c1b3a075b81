import torch
import torch.nn.functional as F
from torch import nn

from box_utils import encode, make_anchors, match


class TinyDetector(nn.Module):
    """Returns a dict of losses in training mode, like the torchvision detectors."""

    def __init__(self, num_classes=2, size=16, stride=4, width=12, norm_layer=nn.BatchNorm2d):
        super().__init__()
        self.register_buffer("anchors", make_anchors(size, stride))
        self.num_classes = num_classes
        per_cell = 2
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), norm_layer(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), norm_layer(2 * width), nn.ReLU(inplace=True),
        )
        self.cls_head = nn.Conv2d(2 * width, per_cell * (num_classes + 1), 3, padding=1)
        self.box_head = nn.Conv2d(2 * width, per_cell * 4, 3, padding=1)

    def forward(self, images, targets=None):
        feats = self.backbone(images)
        b = images.shape[0]
        logits = self.cls_head(feats).permute(0, 2, 3, 1).reshape(b, -1, self.num_classes + 1)
        deltas = self.box_head(feats).permute(0, 2, 3, 1).reshape(b, -1, 4)
        if targets is None:
            return logits, deltas
        return self.compute_loss(logits, deltas, targets)

    def compute_loss(self, logits, deltas, targets):
        cls_targets, positives, box_losses = [], [], []
        for target, delta in zip(targets, deltas):
            idx = match(target["boxes"], self.anchors)
            pos = idx >= 0
            cls = torch.zeros_like(idx)
            cls[pos] = target["labels"][idx[pos]] + 1
            cls_targets.append(cls)
            positives.append(pos.sum())
            wanted = encode(target["boxes"][idx[pos]], self.anchors[pos])
            box_losses.append(F.mse_loss(delta[pos], wanted, reduction="sum"))
        num_pos = torch.stack(positives).clamp(min=1)

        loss_cls = F.cross_entropy(logits.flatten(0, 1), torch.cat(cls_targets))
        loss_box = torch.stack(box_losses) / num_pos
        return {"loss_classifier": loss_cls, "loss_box_reg": loss_box.mean()}
