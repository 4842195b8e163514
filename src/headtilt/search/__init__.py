"""Ways through the space of poses: the paper's tree of levels, a lattice that is refined, and annealing."""
