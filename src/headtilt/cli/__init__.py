"""The command line, a file for each family of commands; needs the extra ``headtilt[cli]``."""

from headtilt.cli import audit, cost, doctor, everyday, reproduce, scale, study
from headtilt.cli.app import app

__all__ = ["app", "audit", "cost", "doctor", "everyday", "reproduce", "scale", "study"]
