"""The paper's networks and the weights that come with the package."""
