"""The cost model of time: links, messages, the work of operators, lines over bytes, and the simulation of steps."""
