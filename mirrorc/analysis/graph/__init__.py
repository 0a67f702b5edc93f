"""Of any graph: aliases, layouts, lifetimes, cuts."""
