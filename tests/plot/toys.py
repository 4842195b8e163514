"""A network, pictures of nothing, and what tells that a figure is whole."""

import torch
from torch import nn

import headtilt as ht

NAMES = ("ant", "bee", "cat", "dog", "elk")
LEVELS = (ht.rotation(), ht.scale(0.25), ht.shear_x(0.25))


def network(channels=1, size=12):
    """Return an untrained network that gives many different labels: it looks at pixels relative to their mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, 16), nn.GELU(), nn.Linear(16, 5, bias=False))
    with torch.no_grad():
        model[1].weight *= 8
        model[1].bias.copy_(-model[1].weight.sum(1) * 0.4)
    return model.eval()


def pictures(count=3, channels=1, size=12):
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(1))


def texts(axes):
    return [text.get_text() for text in axes.texts]


def check_nothing_is_cut_off(figure):
    figure.draw_without_rendering()
    seen, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(seen.x0, seen.y0) >= -0.01, "something lies left of the figure or below it"
    assert seen.x1 <= width + 0.01, "something lies right of the figure"
    assert seen.y1 <= height + 0.01, "something lies above the figure"
