"""headtilt: spatial robustness for any trained image classifier, at inference, without retraining."""

__version__ = "0.1.0.dev0"
