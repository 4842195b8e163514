"""Asking a classifier: what it says of views, and leaving it as it was."""
