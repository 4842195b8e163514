"""The command line, a file for each family of commands; needs the extra ``headtilt[cli]``."""

from headtilt.cli import audit, doctor, everyday, reproduce, scale, study
from headtilt.cli.app import app

__all__ = ["app", "audit", "doctor", "everyday", "reproduce", "scale", "study"]
