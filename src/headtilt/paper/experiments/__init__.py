"""Measurements: one flat file per table or figure, and the command that settles every comparison."""
