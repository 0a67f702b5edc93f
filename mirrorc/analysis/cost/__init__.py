"""Of time: operators, links, messages, simulation."""
