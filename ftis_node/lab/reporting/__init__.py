"""What an experiment shows: claims with their tests, tables and figures."""
