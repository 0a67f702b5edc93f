"""The cost model: links, messages, operators, and the simulation of steps."""
