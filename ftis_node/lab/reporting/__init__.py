"""The report of an experiment: claims with their tests, tables and figures."""
