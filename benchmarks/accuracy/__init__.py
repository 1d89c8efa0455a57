"""How near predicted step times come to published ones: makes docs/accuracy.md."""
