"""Data sets and the perturbed test sets made from them."""
