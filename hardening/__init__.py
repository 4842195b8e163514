"""Attacks on headtilt, one command each: fuzzing, faults, memory limits, mutants, the release as a stranger gets it."""
