"""A daemon's training, taken again from its log and packets."""
