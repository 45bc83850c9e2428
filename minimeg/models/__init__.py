"""Models built from the parallel layers."""
