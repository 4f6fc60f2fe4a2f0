"""Model to ModelFacts, benchmarks, health probes: what needs torch and runs as a child process."""
