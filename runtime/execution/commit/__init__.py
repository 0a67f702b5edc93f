"""The commit of a step: barrier, finite checks, deferred updates."""
