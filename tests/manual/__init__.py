"""Programs that are run by hand: `make chaos`, `kills`, `nat`, `compose-test`, `pictures`."""
