"""A package whose modules are run with -m."""
