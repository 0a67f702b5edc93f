"""Options of compile(): kinds, checks and exclusions, up to StepOptions."""
