"""What is fitted on unlabelled upright images: a calibrator and a gate."""
