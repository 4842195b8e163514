"""Poses and how images are moved by them."""
