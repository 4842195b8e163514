"""Data sets and the perturbed test sets made from them."""

from headtilt.data.catalogue import NAMES, load
from headtilt.data.dataset import Dataset, split

__all__ = ["NAMES", "Dataset", "load", "split"]
