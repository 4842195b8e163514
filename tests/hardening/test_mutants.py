"""Facts that no test stated until a mutant of the core lived through all of them."""
