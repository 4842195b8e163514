"""Data sets and the perturbed test sets made from them."""

from headtilt.paper.data.catalogue import NAMES, load
from headtilt.paper.data.dataset import Dataset, split

__all__ = ["NAMES", "Dataset", "load", "split"]
