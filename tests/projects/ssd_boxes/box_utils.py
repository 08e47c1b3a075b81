import torch


def make_anchors(size, stride, scales=(4.0, 7.0)):
    centers = torch.arange(stride / 2, size, stride)
    cy, cx = torch.meshgrid(centers, centers, indexing="ij")
    per_scale = [torch.stack([cx, cy, torch.full_like(cx, s), torch.full_like(cy, s)], -1) for s in scales]
    return torch.stack(per_scale, 2).view(-1, 4)  # cx, cy, w, h


def cxcywh_to_xyxy(b):
    return torch.cat([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2], dim=1)


def box_iou(a, b):
    lt = torch.max(a[:, None, :2], b[None, :, :2])
    rb = torch.min(a[:, None, 2:], b[None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(2)
    area_a = (a[:, 2:] - a[:, :2]).prod(1)
    area_b = (b[:, 2:] - b[:, :2]).prod(1)
    return inter / (area_a[:, None] + area_b[None] - inter)


def encode(boxes, anchors):
    """Offsets of ground truth boxes (xyxy) relative to anchors (cxcywh)."""
    cxcy = (boxes[:, :2] + boxes[:, 2:]) / 2
    wh = boxes[:, 2:] - boxes[:, :2]
    d_xy = (cxcy - anchors[:, :2]) / anchors[:, 2:]
    d_wh = torch.log(wh / anchors[:, 2:])
    return torch.cat([d_xy, d_wh], dim=1)


def match(boxes, anchors, iou_threshold=0.35):
    """Index of the ground truth box of every anchor, -1 for background; every box keeps its best anchor."""
    if len(boxes) == 0:
        return torch.full((len(anchors),), -1, dtype=torch.long)
    iou = box_iou(boxes, cxcywh_to_xyxy(anchors))
    best_iou, best = iou.max(0)
    best[best_iou < iou_threshold] = -1
    best[iou.argmax(1)] = torch.arange(len(boxes))
    return best
