"""All that serves the reproduction of the paper: data, networks, baselines, experiments."""
