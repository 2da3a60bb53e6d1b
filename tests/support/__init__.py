"""What several tests share: builders, fakes at the edge, tables."""
