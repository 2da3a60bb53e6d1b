"""Plan for a device: a model's geometry, the bytes of each part, and a plan within them."""
