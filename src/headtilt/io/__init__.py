"""Files that headtilt writes and reads: bundles, weights, exported graphs."""
