"""What compile() may be asked for: kinds, checks, exclusions; gives StepOptions."""
