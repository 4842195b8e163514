"""Whole applications around the search: rows for files, batches, a service, a playground."""
